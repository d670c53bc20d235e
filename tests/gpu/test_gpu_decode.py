"""`--decode gpu` on a real GPU: `pytest -m gpu`. The pixels of nvJPEG, and files that it refuses."""

from __future__ import annotations

import io
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from training.data import DataOptions, load_data
from training.data.loader import TrainLoader
from training.data.sampler import BatchPlan
from training.errors import UserError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning"),
]

GPU = torch.device("cuda")
COUNT = 6  # images of each class and part
LEVEL = 1 / 255 / 0.225  # one of 256 grey levels after normalisation


@pytest.fixture
def folder(tmp_path) -> Path:
    """Smooth photographs of several kinds: grey and colour, baseline and progressive, with and without subsampling."""
    generator = np.random.Generator(np.random.PCG64(0))
    for part, name, number in product(("train", "val"), ("a", "b"), range(COUNT)):
        (tmp_path / part / name).mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(generator.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        image = coarse.resize((160, 120), Image.Resampling.BICUBIC).convert("L" if number == 0 else "RGB")
        stream = io.BytesIO()
        subsampling = {} if number == 0 else {"subsampling": number % 3}
        image.save(stream, format="JPEG", quality=95, progressive=number == 4, **subsampling)
        (tmp_path / part / name / f"{number}.jpg").write_bytes(stream.getvalue())
    return tmp_path


def damage(path: Path) -> None:
    """Leave the header, and a scan without content, which no decoder reads."""
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"\xff\xda") + 4] + b"\xff\xd9")


def batches(folder: Path, **options) -> tuple[TrainLoader, list]:
    pair = load_data(DataOptions(str(folder), image_size=64, augmentation="none", **options))
    loader = TrainLoader(pair, BatchPlan(2 * COUNT, 4, 1, 1, 0), 0, device=GPU)
    return loader, list(loader.epoch(0))


def test_pixels_are_those_of_the_exact_decoder(folder):
    (_, exact), (loader, gpu) = (batches(folder, decode=decode) for decode in ("exact", "gpu"))
    for ours, theirs in zip(gpu, exact, strict=True):
        assert ours.images.device.type == "cuda"
        assert torch.equal(ours.labels, theirs.labels)
        assert (ours.images - theirs.images).abs().mean() < 2 * LEVEL
    assert loader.bad_images == {}


def test_a_file_that_no_decoder_reads_is_skipped_as_on_the_cpu(folder):
    broken = folder / "train" / "b" / "3.jpg"
    damage(broken)
    loader, found = batches(folder, decode="gpu", bad_images="skip")
    assert list(loader.bad_images) == [str(broken)]
    weights = {
        int(index): float(weight) for batch in found for index, weight in zip(batch.indices, batch.weights, strict=True)
    }
    assert weights == {index: float(index != COUNT + 3) for index in range(2 * COUNT)}
    assert all(bool(batch.images.isfinite().all()) for batch in found)
    with pytest.raises(UserError, match="cannot use image") as caught:
        batches(folder, decode="gpu")
    assert str(broken) in str(caught.value)


def test_refused_files_leave_the_gpu_usable(folder):
    """Every file of a batch is refused, then the next batch is decoded by the GPU again."""
    paths = sorted((folder / "train").rglob("*.jpg"))
    for path in paths[:COUNT]:
        damage(path)
    loader, found = batches(folder, decode="gpu", bad_images="skip:0.5")
    assert sorted(loader.bad_images) == [str(path) for path in paths[:COUNT]]
    assert sum(float(batch.weights.sum()) for batch in found) == COUNT
    assert not [path for path in loader.notes if Path(path) not in paths]
    assert float(torch.ones(1, device=GPU).sum()) == 1
