"""Shrinking while decoding: the same pixels with and without the compiled part, for all kinds of JPEG and damage."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from made_data import of_files
from PIL import Image
from sklearn.datasets import load_sample_images
from test_data_images import UPRIGHT
from torchvision.transforms.v2.functional import resize

from zerovision.training.base.errors import UserError
from zerovision.training.data.augment import Box
from zerovision.training.data.reading import native
from zerovision.training.data.reading.decode import (
    crop,
    decode,
    header_size,
    make_decoder,
    scale_numerator,
    shrunk_bytes,
)
from zerovision.training.data.reading.files import ImageError, Refused

decode_exact = of_files(decode)
GENERATOR = np.random.Generator(np.random.PCG64(0))
SUBSAMPLINGS = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}


def picture(height: int, width: int) -> np.ndarray:
    """Smooth colours with noise: every frequency of a block occurs."""
    coarse = GENERATOR.integers(0, 256, (height // 7 + 2, width // 7 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return (smooth + GENERATOR.integers(-20, 20, smooth.shape)).clip(0, 255).astype(np.uint8)


def jpeg(pixels: np.ndarray, subsampling: str = "4:2:0", **options) -> bytes:
    stream = io.BytesIO()
    image = Image.fromarray(pixels)
    if subsampling == "grey":
        image.convert("L").save(stream, format="JPEG", quality=90, **options)
    else:
        image.save(stream, format="JPEG", quality=90, subsampling=SUBSAMPLINGS[subsampling], **options)
    return stream.getvalue()


def random_part(height: int, width: int, rng: random.Random) -> Box:
    """A part whose corner lies on the corner of a block half of the time."""
    grid = rng.choice([1, 16])
    top, left = (rng.randrange(0, size, grid) for size in (height, width))
    return Box(top, left, rng.randint(1, height - top), rng.randint(1, width - left))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """`crop_jpeg.c` as it is here, compiled once as `doctor --compile` does it."""
    if not shutil.which("cc") or not Path("/usr/include/jpeglib.h").exists():
        pytest.skip("no C compiler or no jpeglib.h")
    output = tmp_path_factory.mktemp("lib") / "crop_jpeg.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library_path", lambda: output)
        assert native.compile_library() == output
    return output


@pytest.fixture
def compiled(library, monkeypatch):
    monkeypatch.setattr(native, "library_path", lambda: library)
    native.load_library.cache_clear()
    yield
    native.load_library.cache_clear()


def test_without_a_compiler_one_line_says_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "lib" / "crop_jpeg.so")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"not compiled: .*'cc'.* It needs cc and libjpeg's headers"):
        native.compile_library()


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [*SUBSAMPLINGS, "grey"])
def test_a_part_decoded_alone_has_the_pixels_of_the_whole(compiled, subsampling, progressive):
    rng = random.Random(0)
    for height, width in ((1, 1), (17, 31), (64, 48), (199, 133)):
        data = jpeg(picture(height, width), subsampling, progressive=progressive)
        for numerator in (8, 4, 2, 1):
            size = -(-height * numerator // 8), -(-width * numerator // 8)
            whole = np.asarray(_scaled_by_pillow(data, numerator))
            assert whole.shape[:2] == size
            for _ in range(8):
                box = random_part(*size, rng)
                part = native.crop_jpeg(data, numerator, box)
                np.testing.assert_array_equal(part, crop(whole, lambda *_, box=box: box))


def _scaled_by_pillow(data: bytes, numerator: int) -> Image.Image:
    """Decode at a scale by a third libjpeg, Pillow's own."""
    image = Image.open(io.BytesIO(data))
    image.draft(None, (max(1, image.width * numerator // 8), max(1, image.height * numerator // 8)))
    return image.convert("RGB")


def test_compiled_code_of_another_version_is_not_used(compiled, monkeypatch):
    assert native.load_library() is not None
    native.load_library.cache_clear()
    monkeypatch.setattr(native, "API_VERSION", native.API_VERSION + 1)
    assert native.load_library() is None


def test_parts_outside_of_the_image_are_left_alone(compiled):
    data = jpeg(picture(40, 30))
    for box in (Box(-1, 0, 5, 5), Box(0, 0, 41, 5), Box(36, 0, 5, 5), Box(0, 26, 5, 5), Box(0, 0, 0, 5)):
        assert native.crop_jpeg(data, 8, box) is None
    assert native.crop_jpeg(data, 8, Box(35, 25, 5, 5)) is not None


def test_the_scale_is_the_smallest_that_leaves_twice_the_image_size():
    for image_size in (32, 64, 224):
        for shorter in range(1, 4000, 7):
            numerator = scale_numerator(shorter, 2 * shorter, image_size)
            assert numerator == 8 or shorter * numerator / 8 >= 2 * image_size
            assert numerator == 1 or shorter * numerator / 16 < 2 * image_size


def test_the_pixels_are_those_of_pillows_draft():
    """With which pictures can be read without this decoder; also of sides that are no multiple of the scale."""
    for shorter in (63, 64, 65, 95, 96, 127, 128, 129, 255, 256, 257, 300):
        data = jpeg(picture(shorter, shorter + 7))
        image = Image.open(io.BytesIO(data))
        image.draft(None, (32, 32))
        expected, found = np.asarray(image), make_decoder("cpu", 16)(data)
        assert found.shape == expected.shape
        assert np.abs(found.astype(int) - expected).max() <= 1, "two versions of libjpeg"


def _write_kinds(folder: Path) -> list[Path]:
    """Files of every kind that takes another way through the decoder."""
    pixels = picture(130, 170)
    exif = Image.Exif()
    exif[0x0112] = 6
    contents = {f"{kind}.jpg": jpeg(pixels, kind.replace("-", ":")) for kind in ("4-4-4", "4-2-0", "grey")}
    contents["progressive.jpg"] = jpeg(pixels, progressive=True)
    contents["turned.jpg"] = jpeg(pixels, exif=exif)
    contents["extra.jpg"] = jpeg(pixels) + b"trailing bytes"
    contents["stuffed.jpg"] = jpeg(pixels)[:-2] + b"\0" * 40 + b"\xff\xd9"  # a warning of libjpeg, and no damage
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    Image.fromarray(pixels).convert("CMYK").save(folder / "cmyk.jpg", quality=90)
    Image.fromarray(pixels).save(folder / "image.png")
    return sorted(folder.iterdir())


@pytest.mark.parametrize("with_compiled_code", [True, False])
def test_a_part_of_a_file_is_a_part_of_what_is_read(tmp_path, request, monkeypatch, with_compiled_code):
    if with_compiled_code:
        request.getfixturevalue("compiled")
    else:
        monkeypatch.setattr("zerovision.training.data.reading.decode.crop_jpeg", lambda *_: None)
    folder = tmp_path / "images"
    folder.mkdir()
    rng = random.Random(1)
    for path in _write_kinds(folder):
        for image_size in (16, 200):
            decode_file = of_files(make_decoder("cpu", image_size))
            whole = decode_file(str(path))
            assert whole.nbytes == shrunk_bytes(*header_size(path.read_bytes()), image_size)
            for _ in range(5):
                box = random_part(*whole.shape[:2], rng)
                part = decode_file(str(path), lambda *_, box=box: box)
                np.testing.assert_array_equal(part, crop(whole, lambda *_, box=box: box), err_msg=path.name)
        # nothing is shrunk at 200 pixels: what Pillow decodes, within what two versions of libjpeg may differ by
        full = decode_exact(str(path)).astype(int)
        assert np.abs(full - whole).max() <= 1, path.name


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_shrunk_photographs_are_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = jpeg(picture(100, 130), exif=exif)
    as_stored = simplejpeg.decode_jpeg(data, min_height=50, min_width=65)
    np.testing.assert_array_equal(make_decoder("cpu", 20)(data), UPRIGHT[orientation](as_stored))


def test_every_truncation_is_found_by_both_ways(tmp_path):
    data = jpeg(picture(60, 80))
    path = tmp_path / "cut.jpg"
    decode_file = of_files(make_decoder("cpu", 16))
    for length in range(2, len(data) - 2, 97):
        path.write_bytes(data[:length])
        for read in (decode_exact, decode_file, lambda name: decode_file(name, lambda *_: Box(0, 0, 5, 5))):
            with pytest.raises(ImageError):
                read(str(path))


def test_damaged_files_give_an_image_or_an_image_error(tmp_path):
    rng = random.Random(2)
    path = tmp_path / "damaged.jpg"
    decode_file = of_files(make_decoder("cpu", 16))
    for _ in range(150):
        data = bytearray(jpeg(picture(48, 64), rng.choice([*SUBSAMPLINGS, "grey"]), progressive=rng.random() < 0.5))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        for read in (decode_file, lambda name: decode_file(name, lambda h, w: Box(h // 2, 0, h - h // 2, w))):
            with contextlib.suppress(ImageError):
                pixels = read(str(path))
                assert pixels.dtype == np.uint8
                assert pixels.shape[2] == 3


def test_headers_that_are_not_plain_are_left_to_pillow():
    data = jpeg(picture(20, 30))
    for damaged in (b"", data[:3], data[:100], b"GIF89a" + data):
        with pytest.raises(Refused, match=r"not an image|[Tt]runcated"):
            decode(damaged, shrink_to=16)
    with pytest.raises(Refused, match="600 pixels, more than"):
        decode(data, shrink_to=16, max_pixels=599)


@pytest.mark.parametrize("image_size", [64, 128])
def test_shrunk_photographs_look_as_if_decoded_whole(image_size):
    """Both are resized to what the model sees; the difference is a fraction of a grey level of 256 on average."""
    for photograph in load_sample_images().images:
        data = jpeg(photograph)
        images = [
            resize(torch.from_numpy(read(data)).permute(2, 0, 1), [image_size] * 2, antialias=True).int()
            for read in (decode, make_decoder("cpu", image_size))
        ]
        assert float((images[0] - images[1]).abs().float().mean()) < 1.5
