"""Time of decoding, cropping and resizing one JPEG photograph of 500x375 pixels, per core, in one run.

    python benchmarks/decode.py

All variants read the same files and draw crops of the same distribution (8 to 100 % of the area); the baseline is
torchvision's default: Pillow, then `RandomResizedCrop` on the Pillow image. One thread, CPU time of the process; all
variants run in every round, in shuffled order; a ratio is taken within each round, and the median over the rounds is
printed with the quartiles. The first round only warms up. The column of grey levels is the mean absolute difference of
the whole image, resized, to the same image decoded in full, of 256.

The rows "from ..." read whole samples of a data set: ours from a folder, tar and Parquet files, in a random order;
torchvision's ImageFolder, and if they are installed WebDataset and LitData, which go through their files in order.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from photographs import write_photographs
from PIL import Image
from rich.console import Console
from rich.table import Table
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

from tests.unit.made_data import CLASSES, as_parquet
from zerovision.delivery.pack import pack
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.augment import CROP_DRAWS, BoxChooser, random_box, resize
from zerovision.training.data.reading import native
from zerovision.training.data.reading.cache import ImageCache
from zerovision.training.data.reading.decode import Decoder, crop, decode_exact, make_decoder

OURS = {"a folder": "photos", "tar": "tar", "Parquet": "parquet"}
BASELINE = "torchvision, Pillow"
ReadCrop = Callable[[str], torch.Tensor]


def peers(image_size: int) -> dict[str, ReadCrop]:
    """Return what others do, from a path to uint8 [3, S, S]."""
    crop, to_tensor = v2.RandomResizedCrop(image_size, antialias=True), v2.PILToTensor()

    def pillow(path: str) -> torch.Tensor:
        return to_tensor(crop(Image.open(path).convert("RGB")))

    def pillow_draft(path: str) -> torch.Tensor:
        image = Image.open(path)
        image.draft("RGB", (2 * image_size, 2 * image_size))
        return to_tensor(crop(image.convert("RGB")))

    def tensors(path: str) -> torch.Tensor:
        return crop(decode_jpeg(read_file(path), mode=ImageReadMode.RGB))

    return {BASELINE: pillow, "torchvision, Pillow with draft": pillow_draft, "torchvision.io, tensors": tensors}


def sets(paths: list[str], image_size: int, folder: Path, draws: random.Random) -> dict[str, ReadCrop]:
    """Return what reads the next sample of a data set, whatever it is given."""
    folder.mkdir()
    for number, path in enumerate(paths):
        place = folder / "photos" / CLASSES[number % len(CLASSES)] / Path(path).name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.hardlink_to(path)
    pack(DataOptions(data=str(folder / "photos")), folder / "tar", 16_000_000)
    as_parquet(folder / "photos", folder / "parquet")
    crop, to_tensor = v2.RandomResizedCrop(image_size, antialias=True), v2.PILToTensor()

    def ours_from(kind: str) -> ReadCrop:
        train = load_data(DataOptions(data=str(folder / kind), image_size=image_size)).train
        return lambda _: train.read(0, draws.randrange(len(train)), [draws.random() for _ in range(CROP_DRAWS)])

    images = ImageFolder(str(folder / "photos"), v2.Compose([crop, to_tensor]))
    found: dict[str, ReadCrop] = {"from a folder, ImageFolder": lambda _: images[draws.randrange(len(images))][0]}
    with suppress(ImportError):
        import webdataset

        urls = sorted(str(path) for path in (folder / "tar").glob("train-*.tar"))
        stream = webdataset.WebDataset(urls, shardshuffle=False).repeat().decode("pilrgb").to_tuple("jpg")
        samples = iter(stream.map_tuple(v2.Compose([crop, to_tensor])))
        found["from tar, WebDataset"] = lambda _: next(samples)[0]
    with suppress(ImportError):
        import litdata

        writer = litdata.streaming.cache.Cache(str(folder / "litdata"), chunk_bytes="16MB")
        for number, path in enumerate(paths):
            writer[number] = {"image": Image.open(path), "label": number % len(CLASSES)}
        writer.done()
        writer.merge()
        chunks = itertools.chain.from_iterable(itertools.repeat(litdata.StreamingDataset(str(folder / "litdata"))))
        found["from chunks, LitData"] = lambda _: crop(next(chunks)["image"])
    return found | {f"from {kind}, ours": ours_from(place) for kind, place in OURS.items()}


def ours(decode: Decoder, image_size: int, draws: random.Random) -> ReadCrop:
    """Return our way: draw the crop, decode, resize."""
    preprocessing = {"image_size": image_size, "interpolation": "bilinear"}

    def read(path: str) -> torch.Tensor:
        numbers = [draws.random() for _ in range(CROP_DRAWS)]
        part = decode(path, partial(random_box, draws=numbers))
        return resize(torch.from_numpy(part).permute(2, 0, 1), preprocessing)

    return read


def without_compiled_code(decode: Decoder) -> Decoder:
    """Return the decoder of whole images at a scale with simplejpeg."""
    return lambda path, choose=None: crop(decode(path), choose)


def from_cache(decode: Decoder, paths: list[str], folder: Path) -> Decoder:
    """Return what takes shrunk images from a cache that has been filled."""
    folder.mkdir()
    cache, positions = ImageCache(folder, 10**9), {path: position for position, path in enumerate(paths)}
    for path, position in positions.items():
        cache.put(position, decode(path))

    def read(path: str, choose: BoxChooser | None = None) -> np.ndarray:
        pixels = cache.get(positions[path])
        assert pixels is not None
        return crop(pixels, choose)

    return read


def grey_levels(paths: list[str], decode: Decoder, image_size: int) -> float:
    """Return the mean absolute difference to a full decode, both resized to S x S."""
    differences = []
    for path in paths:
        images = [
            v2.functional.resize(torch.from_numpy(pixels).permute(2, 0, 1), [image_size] * 2, antialias=True).float()
            for pixels in (decode(path), decode_exact(path))
        ]
        differences.append(float((images[0] - images[1]).abs().mean()))
    return statistics.mean(differences)


def measure(paths: list[str], image_size: int, rounds: int, folder: Path) -> Table:
    """Time all variants and return the table."""
    draws = random.Random(0)
    shrunk = make_decoder("cpu", image_size)
    decoders: dict[str, Decoder] = {
        "--decode exact": decode_exact,
        "--decode cpu without compiled code": without_compiled_code(shrunk),
        "--decode cpu": shrunk,
        "--decode cpu, from the cache": from_cache(shrunk, paths, folder),
    }
    variants = peers(image_size) | {name: ours(decode, image_size, draws) for name, decode in decoders.items()}
    variants |= sets(paths, image_size, folder.with_name(f"sets-{image_size}"), draws)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name in draws.sample(list(variants), len(variants)):
            start = time.process_time()
            for path in paths:
                variants[name](path)
            seconds[name].append((time.process_time() - start) / len(paths))
    table = Table(f"to {image_size} pixels", "speed", "quartiles", "ms per image", "images/s", "grey levels")
    for name in variants:
        ratios = [base / own for base, own in zip(seconds[BASELINE][1:], seconds[name][1:], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(seconds[name][1:])
        difference = f"{grey_levels(paths, decoders[name], image_size):.2f}" if name in decoders else ""
        row = (f"{statistics.median(ratios):.2f}", f"{low:.2f}-{high:.2f}", f"{1e3 * median:.3f}", f"{1 / median:.0f}")
        table.add_row(name, *row, difference)
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--image-sizes", type=int, nargs="+", default=[64, 224])
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as name:
        paths = [str(path) for path in write_photographs(Path(name), given.images)]
        kilobytes = statistics.mean(Path(path).stat().st_size for path in paths) / 1e3
        console.print(
            f"{given.images} files of 500x375 pixels, {kilobytes:.0f} kB on average, {given.rounds} rounds, "
            f"compiled code: {'yes' if native.load_library() else 'no'}"
        )
        for image_size in given.image_sizes:
            console.print(measure(paths, image_size, given.rounds, Path(name) / f"cache-{image_size}"))


if __name__ == "__main__":
    main()
