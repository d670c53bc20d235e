"""Opening image files: right pixels for every mode, one clear line for every broken file."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from training.data.crops import Box
from training.data.decode import ShrinkingDecoder
from training.data.images import ImageError, open_image
from training.errors import UserError

GENERATOR = np.random.Generator(np.random.PCG64(0))
RGB = GENERATOR.integers(0, 256, (11, 17, 3), dtype=np.uint8)


def pixels(path) -> np.ndarray:
    image = open_image(path)
    assert image.mode == "RGB"
    return np.asarray(image)


def write_png(path, width, height, bit_depth, colour_type, rows: bytes) -> None:
    """Write a PNG by hand: for depths and header sizes that Pillow does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bit_depth, colour_type, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "ppm", "webp"])
def test_rgb_comes_back_unchanged(tmp_path, suffix):
    path = tmp_path / f"image.{suffix}"
    Image.fromarray(RGB).save(path, **({"lossless": True} if suffix == "webp" else {}))
    np.testing.assert_array_equal(pixels(path), RGB)


def test_the_content_decides_not_the_name(tmp_path):
    Image.fromarray(RGB).save(tmp_path / "image.jpg", format="PNG")
    np.testing.assert_array_equal(pixels(tmp_path / "image.jpg"), RGB)


def test_grey_becomes_three_equal_channels(tmp_path):
    Image.fromarray(RGB[..., 0]).save(tmp_path / "grey.png")
    np.testing.assert_array_equal(pixels(tmp_path / "grey.png"), np.repeat(RGB[..., :1], 3, axis=2))


def test_bilevel_becomes_black_and_white(tmp_path):
    bits = RGB[..., 0] > 127
    Image.fromarray(bits).save(tmp_path / "bits.png")
    np.testing.assert_array_equal(pixels(tmp_path / "bits.png"), np.repeat(bits[..., None] * np.uint8(255), 3, axis=2))


# what each EXIF orientation asks for, in NumPy (EXIF 2.3, tag 0x0112)
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_orientation_is_applied(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(RGB).save(tmp_path / "image.png", exif=exif)
    np.testing.assert_array_equal(pixels(tmp_path / "image.png"), UPRIGHT[orientation](RGB))


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bit_grey_is_scaled_by_257(tmp_path, suffix):
    values = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    Image.fromarray(values).save(tmp_path / f"deep.{suffix}")
    result = pixels(tmp_path / f"deep.{suffix}")
    np.testing.assert_array_equal(result[..., 0], np.rint(values.astype(np.float64) / 257))
    assert len(np.unique(result)) == 256


def test_16_bit_grey_of_portable_graymap(tmp_path):
    values = np.linspace(0, 65535, 256).astype(">u2").reshape(16, 16)
    (tmp_path / "deep.pgm").write_bytes(b"P5 16 16 65535\n" + values.tobytes())
    np.testing.assert_array_equal(pixels(tmp_path / "deep.pgm")[..., 0], np.rint(values / 257))


def test_16_bit_rgb_keeps_its_brightness(tmp_path):
    values = GENERATOR.integers(0, 65536, (9, 5, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    write_png(tmp_path / "deep.png", 5, 9, bit_depth=16, colour_type=2, rows=rows)
    assert np.abs(pixels(tmp_path / "deep.png").astype(int) - values / 257).max() <= 1


def test_float_from_0_to_1_is_scaled(tmp_path):
    values = GENERATOR.random((8, 8), dtype=np.float32)
    Image.fromarray(values).save(tmp_path / "float.tif")
    np.testing.assert_array_equal(pixels(tmp_path / "float.tif")[..., 0], np.rint(values * 255))


@pytest.mark.parametrize("values", [np.float32([[0, 300]]), np.float32([[0, np.nan]]), np.int32([[0, 70000]])])
def test_values_of_unknown_scale_are_refused(tmp_path, values):
    Image.fromarray(values).save(tmp_path / "odd.tif")
    with pytest.raises(ImageError, match="known scale"):
        open_image(tmp_path / "odd.tif")


def test_palette(tmp_path):
    indices = GENERATOR.integers(0, 4, (6, 7), dtype=np.uint8)
    palette = np.uint8([[10, 20, 30], [255, 0, 0], [0, 255, 0], [3, 2, 1]])
    image = Image.frombytes("P", (7, 6), indices.tobytes())
    image.putpalette(palette.tobytes())
    image.save(tmp_path / "palette.png")
    np.testing.assert_array_equal(pixels(tmp_path / "palette.png"), palette[indices])
    image.save(tmp_path / "transparent.png", transparency=1)
    expected = np.where(indices[..., None] == 1, 255, palette[indices])
    np.testing.assert_array_equal(pixels(tmp_path / "transparent.png"), expected)


def test_transparent_pixels_are_laid_on_white(tmp_path):
    alpha = GENERATOR.integers(0, 256, (11, 17, 1), dtype=np.uint8)
    Image.fromarray(np.concatenate([RGB, alpha], axis=2)).save(tmp_path / "alpha.png")
    share = alpha / 255
    expected = RGB * share + 255 * (1 - share)
    assert np.abs(pixels(tmp_path / "alpha.png") - expected).max() <= 1


@pytest.mark.parametrize("suffix", ["tif", "jpg"])
def test_cmyk(tmp_path, suffix):
    cmyk = np.full((16, 16, 4), (40, 90, 160, 30), dtype=np.uint8)
    Image.frombytes("CMYK", (16, 16), cmyk.tobytes()).save(tmp_path / f"cmyk.{suffix}")
    expected = (255.0 - cmyk[..., :3]) * (255.0 - cmyk[..., 3:]) / 255
    tolerance = 1 if suffix == "tif" else 4  # JPEG is lossy even for one colour
    assert np.abs(pixels(tmp_path / f"cmyk.{suffix}") - expected).max() <= tolerance


def test_a_phone_photo_with_a_preview_is_no_animation(tmp_path):
    first, second = Image.new("RGB", (40, 30), "red"), Image.new("RGB", (20, 15), "blue")
    first.save(tmp_path / "phone.jpg", format="MPO", save_all=True, append_images=[second])
    with Image.open(tmp_path / "phone.jpg") as image:
        assert image.n_frames == 2
    result = pixels(tmp_path / "phone.jpg")
    assert result.shape == (30, 40, 3)
    assert np.abs(result.astype(int) - (255, 0, 0)).max() <= 2


def _animation(path):
    frames = [Image.fromarray(np.roll(RGB, shift, axis=0)) for shift in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def _text(path):
    path.write_text("this is no picture\n" * 50)


def _empty(path):
    path.write_bytes(b"")


def _truncated(path):
    stream = io.BytesIO()
    Image.fromarray(GENERATOR.integers(0, 256, (200, 200, 3), dtype=np.uint8)).save(stream, format="JPEG")
    data = stream.getvalue()
    path.write_bytes(data[: len(data) // 2])
    with Image.open(path) as image:
        image.verify()  # Pillow's own check is content with it


def _truncated_png(path):
    Image.fromarray(GENERATOR.integers(0, 256, (200, 200, 3), dtype=np.uint8)).save(path, format="PNG")
    path.write_bytes(path.read_bytes()[:50_000])


def _small_bomb(path):
    write_png(path, 8000, 8000, bit_depth=8, colour_type=2, rows=b"\0" * 100)


def _medium_bomb(path):
    write_png(path, 12000, 12000, bit_depth=8, colour_type=2, rows=b"\0" * 100)


def _huge_bomb(path):
    write_png(path, 60000, 60000, bit_depth=8, colour_type=2, rows=b"\0" * 100)


def _postscript(path):
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        ("a.gif", _animation, "animation with 3 frames"),
        ("a.webp", _animation, "animation with 3 frames"),
        ("a.png", _animation, "animation with 3 frames"),
        ("a.tiff", _animation, "animation with 3 frames"),
        ("text.jpg", _text, "not an image"),
        ("empty.jpg", _empty, "not an image"),
        ("cut.jpg", _truncated, "truncated"),
        ("cut.png", _truncated_png, "truncated"),
        ("bomb.png", _small_bomb, "8000x8000 pixels, more than the 50 megapixels"),
        ("bomb.png", _medium_bomb, "12000x12000 pixels, more than the 50 megapixels"),
        ("bomb.png", _huge_bomb, "more than 50 megapixels"),
        ("program.jpg", _postscript, "not an image"),
        ("missing.jpg", lambda path: None, "No such file"),
        ("folder.jpg", lambda path: path.mkdir(), "directory"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_with_its_name(tmp_path, name, make, reason, recwarn):
    make(tmp_path / name)
    decoder = ShrinkingDecoder(16)
    for read in (open_image, decoder.read, lambda path: decoder.read_part(path, lambda *_: Box(0, 0, 1, 1))):
        with pytest.raises(ImageError, match=reason) as caught:
            read(str(tmp_path / name))
        assert isinstance(caught.value, UserError)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not recwarn.list


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path):
    Image.new("RGB", (100, 60)).save(tmp_path / "image.png")
    assert open_image(tmp_path / "image.png", max_pixels=6000).size == (100, 60)
    (tmp_path / "image.png").write_bytes((tmp_path / "image.png").read_bytes()[:60])  # decoding would say "truncated"
    with pytest.raises(ImageError, match="100x60 pixels, more than"):
        open_image(tmp_path / "image.png", max_pixels=5999)


def test_a_line_break_in_a_file_name_does_not_break_the_message(tmp_path):
    path = tmp_path / "two\nlines.jpg"
    path.write_text("text")
    with pytest.raises(ImageError) as caught:
        open_image(path)
    assert "\n" not in str(caught.value)
