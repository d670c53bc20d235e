"""Two runs compared by their hashes: equal, another image, another setting, and what cannot be compared."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_data_check import make_images, train

from tests.training.commands import read_metrics
from zerovision.extras.bisect_runs import compare, lines_of
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import WEIGHTS
from zerovision.training.observe.step_hashes import tensor_hash


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of six steps: alike, without hashes, with another rate, and with a pixel of the last image changed."""
    folder = tmp_path_factory.mktemp("bisected")
    data = make_images(folder / "data" / "train", 12).parent
    make_images(data / "val", 3, seed=1)
    flags = {"log_hashes": 1, "augmentation": "none"}
    for name, changes in {"a": {}, "b": {}, "bare": {"log_hashes": 0}, "rate": {"learning_rate": 0.01}}.items():
        train(data, folder, name, **flags | changes)
    image = data / "train" / "b" / "7.png"
    pixels = np.asarray(Image.open(image)).copy()
    pixels[6:, 6:] ^= 128
    Image.fromarray(pixels).save(image)
    train(data, folder, "pixel", **flags)
    return folder / "runs"


def hashes(run) -> dict[int, dict]:
    return {line["step"]: line for line in read_metrics(run, "hashes")}


def test_a_hash_is_that_of_the_values_in_order():
    values = torch.arange(24.0).view(2, 3, 2, 2)
    expected = hashlib.blake2b(values.numpy().tobytes(), digest_size=8).hexdigest()
    assert tensor_hash(values) == tensor_hash(values.to(memory_format=torch.channels_last)) == expected


def test_equal_runs(runs):
    assert len({(runs / name / WEIGHTS).read_bytes() for name in ("a", "b", "bare")}) == 1, "hashes change nothing"
    found = compare(runs / "a", runs / "b")
    assert (found.compared, found.last_equal, found.step, found.settings) == (6, 6, 0, [])
    assert next(lines_of(found)) == "equal        at all 6 steps with hashes, up to step 6"


def test_another_image(runs):
    """The step is the one whose micro-batch holds the changed image, and the images are what differs."""
    found = compare(runs / "a", runs / "pixel")
    ours, others = hashes(runs / "a"), hashes(runs / "pixel")
    (first, *_) = (step for step in ours if ours[step]["leaves"][0]["images"] != others[step]["leaves"][0]["images"])
    assert (found.step, found.last_equal, found.found.images_differ) == (first, first - 1, True)
    assert "batches      1 of 1 differ: rank 0 (micro-batch 1): different images" in list(lines_of(found))
    assert found.settings == ["images of training: 1 are in only one run, or differ in content or label"]


def test_another_rate(runs):
    found = compare(runs / "a", runs / "rate")
    assert (found.step, found.found.images_differ) == (1, False)
    assert found.found.tensors
    assert found.settings == ["--learning-rate: 0.001 | 0.01"]
    assert list(lines_of(found))[1].startswith("differ       at step 1: the same images; ")
    assert "batches      all 1 are equal: their sum or the update differs" in list(lines_of(found))


def test_what_cannot_be_compared(runs, tmp_path):
    bare = Path(shutil.copytree(runs / "bare", tmp_path / "bare"))
    with pytest.raises(UserError, match="run bare has no hashes: train it with --log-hashes 1"):
        compare(runs / "a", bare)
    line = {"kind": "hashes", "step": 1, "weights": {"w": "00"}}
    (bare / "metrics.jsonl").write_text(json.dumps(line))
    with pytest.raises(UserError, match="train different networks"):
        compare(runs / "a", bare)
    (bare / "metrics.jsonl").write_text(json.dumps(line | {"step": 99}))
    with pytest.raises(UserError, match="no step with hashes in common"):
        compare(runs / "a", bare)
