"""Opening image files: right pixels for every mode, one clear line for every broken file."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from made_data import of_files
from PIL import Image, features

from zerovision.training.base.errors import UserError
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.augment import Box
from zerovision.training.data.reading.decode import MAX_PIXELS, header_size, load, make_decoder, to_channels
from zerovision.training.data.reading.files import CURES, MAX_FILE_BYTES, ImageError, pillow_formats


def open_image(data, notes=None, max_pixels=MAX_PIXELS):
    """Return an image in full, as Pillow's."""
    return load(data, max_pixels, lambda image: to_channels(image, 3), notes)


open_file = of_files(open_image)
GENERATOR = np.random.Generator(np.random.PCG64(0))
RGB = GENERATOR.integers(0, 256, (11, 17, 3), dtype=np.uint8)


def pixels(path, found=None) -> np.ndarray:
    image = open_file(path, found=found)
    assert image.mode == "RGB"
    return np.asarray(image)


def chunk(kind: bytes, data: bytes, damage: int = 0) -> bytes:
    """Return a chunk of a PNG, whose checksum may be damaged."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) ^ damage)


def write_png(path, width, height, bit_depth, colour_type, rows: bytes, transparent: bytes = b"") -> None:
    """Write a PNG by hand: for depths and header sizes that Pillow does not write."""
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bit_depth, colour_type, 0, 0, 0))
        + (chunk(b"tRNS", transparent) if transparent else b"")
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def write_grey_tiff(path, width, height, bits, photometric, rows: bytes) -> None:
    """Write an uncompressed grey TIFF by hand, for depths that Pillow does not write."""
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 0, 277: 1, 278: height, 279: len(rows)}
    tags[273] = 8 + 2 + 12 * len(tags) + 4  # where the rows begin
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    path.write_bytes(b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + b"\0\0\0\0" + rows)


def test_16_bits_in_planes_are_refused(tmp_path):
    """Pillow reads every plane as 8 bits."""
    planes = np.full((3, 4, 5), 0x1234, "<u2").tobytes()
    tags = {256: (4, 5), 257: (4, 4), 259: (4, 1), 262: (4, 2), 277: (4, 3), 284: (4, 2)}
    places = 8 + 2 + 12 * (len(tags) + 3) + 4  # where arrays of three begin: bits, offsets, lengths
    tags |= {258: (4, places), 273: (4, places + 12), 279: (4, places + 24)}
    counts = dict.fromkeys((258, 273, 279), 3)
    entries = b"".join(
        struct.pack("<HHII", tag, kind, counts.get(tag, 1), v) for tag, (kind, v) in sorted(tags.items())
    )
    values = struct.pack("<9I", 16, 16, 16, *(places + 36 + 40 * n for n in range(3)), 40, 40, 40)
    path = tmp_path / "planes.tif"
    path.write_bytes(b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + b"\0\0\0\0" + values + planes)
    with pytest.raises(ImageError, match="more than 8 bits in separate planes"):
        pixels(path)


BITS = RGB[..., 0] > 127


@pytest.mark.parametrize(
    ("name", "options", "saved", "expected"),
    [
        *((f"image.{suffix}", {}, RGB, RGB) for suffix in ("png", "bmp", "tif", "ppm")),
        ("image.webp", {"lossless": True}, RGB, RGB),
        ("image.jpg", {"format": "PNG"}, RGB, RGB),  # the content decides, not the name
        ("grey.png", {}, RGB[..., 0], np.repeat(RGB[..., :1], 3, axis=2)),
        ("bits.png", {}, BITS, np.repeat(BITS[..., None] * np.uint8(255), 3, axis=2)),
    ],
)
def test_up_to_8_bits_come_back_unchanged(tmp_path, name, options, saved, expected):
    Image.fromarray(saved).save(tmp_path / name, **options)
    np.testing.assert_array_equal(pixels(tmp_path / name), expected)


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


RAMP = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
RAMP_12 = np.linspace(0, 4095, 64 * 64).astype(np.uint16).reshape(64, 64)
ROWS_12 = b"".join(int(one << 12 | other).to_bytes(3, "big") for one, other in RAMP_12.reshape(-1, 2).tolist())
FLOATS = GENERATOR.random((8, 8), dtype=np.float32)
DEEP = {  # how a file is written, and the levels of 255
    "16 bits.png": (lambda path: Image.fromarray(RAMP).save(path), RAMP / 257),
    "16 bits.tif": (lambda path: Image.fromarray(RAMP).save(path), RAMP / 257),
    "16 bits.pgm": (lambda path: path.write_bytes(b"P5 64 64 65535\n" + RAMP.astype(">u2").tobytes()), RAMP / 257),
    "12 bits.tif": (
        lambda path: write_grey_tiff(path, 64, 64, 12, photometric=1, rows=ROWS_12),
        RAMP_12 * (255 / 4095),
    ),
    "zero is white.tif": (
        lambda path: write_grey_tiff(path, 64, 64, 16, photometric=0, rows=RAMP.astype("<u2").tobytes()),
        (65535.0 - RAMP) / 257,
    ),
    "floats from 0 to 1.tif": (lambda path: Image.fromarray(FLOATS).save(path), FLOATS * 255),
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_grey_is_scaled_by_its_own_range(tmp_path, name):
    write, levels = DEEP[name]
    write(tmp_path / name)
    np.testing.assert_array_equal(pixels(tmp_path / name), np.repeat(np.rint(levels)[..., None], 3, axis=2))


def test_16_bit_rgb_keeps_its_brightness(tmp_path):
    values = GENERATOR.integers(0, 65536, (9, 5, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    write_png(tmp_path / "deep.png", 5, 9, bit_depth=16, colour_type=2, rows=rows)
    assert np.abs(pixels(tmp_path / "deep.png").astype(int) - values / 257).max() <= 1


@pytest.mark.parametrize("bit_depth", [1, 2, 4, 8, 16])
def test_the_transparent_level_of_a_grey_png_is_laid_on_white(tmp_path, bit_depth):
    white = 2**bit_depth - 1
    levels = np.array([0, white]) if bit_depth == 1 else np.array([0, white // 3, white // 3 + 1, white // 2])
    transparent = int(levels[1]) if bit_depth > 1 else 0
    bits = "".join(f"{level:0{bit_depth}b}" for level in levels)
    row = b"\0" + int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    path = tmp_path / "grey.png"
    write_png(path, len(levels), 1, bit_depth, colour_type=0, rows=row, transparent=struct.pack(">H", transparent))
    expected = np.where(levels == transparent, 255, np.rint(levels * (255 / white)))
    np.testing.assert_array_equal(pixels(path)[0, :, 0], expected)


def test_the_transparent_colour_of_a_16_bit_png_is_laid_on_white(tmp_path):
    values = np.array([[[1000, 2000, 3000], [50000, 40000, 30000]]], dtype=">u2")
    rows = b"\0" + values.tobytes()
    write_png(tmp_path / "deep.png", 2, 1, 16, colour_type=2, rows=rows, transparent=values[0, 1].tobytes())
    assert pixels(tmp_path / "deep.png").tolist() == [[[3, 7, 11], [255, 255, 255]]]


@pytest.mark.parametrize("values", [np.float32([[0, 300]]), np.float32([[0, np.nan]]), np.int32([[0, 70000]])])
def test_values_of_unknown_scale_are_refused(tmp_path, values):
    Image.fromarray(values).save(tmp_path / "odd.tif")
    with pytest.raises(ImageError, match="known scale"):
        open_file(tmp_path / "odd.tif")


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


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tiff"])
def test_of_several_frames_the_first_is_taken_and_noted(tmp_path, suffix):
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "lime", "blue")]
    path = str(tmp_path / f"a.{suffix}")
    frames[0].save(path, save_all=True, append_images=frames[1:])
    decode = of_files(make_decoder("cpu", 16))
    for read in (pixels, decode, lambda path, found: decode(path, lambda *_: Box(0, 0, 10, 20), found=found)):
        result = read(path, found=(notes := {}))
        assert notes == {path: "several frames or pages: the first is used"}
        assert result.shape == (10, 20, 3)
        assert np.abs(result.astype(int) - (255, 0, 0)).max() <= 2
    frames[0].save(path)
    pixels(path, notes := {})
    assert notes == {}


def test_notes_are_on_their_own_file_whatever_other_threads_read(tmp_path):
    pages, good = tmp_path / "pages.tif", tmp_path / "good.tif"
    Image.fromarray(RGB).save(pages, save_all=True, append_images=[Image.fromarray(RGB)])
    Image.fromarray(RGB).save(good)

    notes: dict[str, str] = {}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda path: open_file(path, found=notes), [pages, good] * 20))
    assert {*notes} == {str(pages)}


def _damaged_tiff(path):
    Image.fromarray(RGB).save(path, compression="tiff_lzw")
    data = bytearray(path.read_bytes())
    with Image.open(path) as image:
        start = image.tag_v2[273][0]
    data[start + 20 : start + 60] = b"\xff" * 40
    path.write_bytes(data)


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


def _bomb(side):
    return lambda path: write_png(path, side, side, bit_depth=8, colour_type=2, rows=b"\0" * 100)


def _postscript(path):
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")


def _huge_file(path):
    path.touch()
    os.truncate(path, MAX_FILE_BYTES + 10**6)  # sparse: takes no disk


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        ("text.jpg", lambda path: path.write_text("not a picture\n" * 50), "not an image"),
        ("two\nlines.jpg", lambda path: path.write_text("text"), "not an image"),
        ("empty.jpg", lambda path: path.touch(), "not an image"),
        ("damaged.tif", _damaged_tiff, "decoder error -2"),
        ("cut.jpg", _truncated, "truncated"),
        ("cut.png", _truncated_png, "truncated"),
        ("bomb.png", _bomb(14000), "196,000,000 pixels, more than the 179 megapixels of --max-megapixels"),
        ("bomb.png", _bomb(60000), "3,600,000,000 pixels, more than the 179 megapixels of --max-megapixels"),
        ("program.jpg", _postscript, "not an image"),
        ("missing.jpg", lambda path: None, "No such file"),
        ("folder.jpg", lambda path: path.mkdir(), "directory"),
        ("pipe.jpg", os.mkfifo, "not a regular file"),
        ("endless.jpg", lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        ("kernel.jpg", lambda path: path.symlink_to("/proc/self/maps"), "more than 0 bytes, the size"),
        ("large.jpg", _huge_file, "1501 MB, more than the 1500 MB allowed"),
        ("null\0.jpg", lambda path: None, "embedded null byte"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_with_its_name(tmp_path, name, make, reason, recwarn):
    make(tmp_path / name)
    decode = of_files(make_decoder("cpu", 16))
    for read in (open_file, decode, lambda path: decode(path, lambda *_: Box(0, 0, 1, 1))):
        with pytest.raises(ImageError, match=reason) as caught:
            read(str(tmp_path / name))
        assert isinstance(caught.value, UserError)
        assert repr(str(tmp_path / name)) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert {one.category for one in recwarn} <= {Image.DecompressionBombWarning}  # of less than twice the limit


REFUSED_METADATA = {  # by Pillow
    "profile": chunk(b"iCCP", b"icc\0\0" + zlib.compress(bytes(2_000_000))),
    "compressed text": chunk(b"zTXt", b"workflow\0\0" + zlib.compress(bytes(3_000_000))),
    "international text": chunk(b"iTXt", b"workflow\0\1\0\0\0" + zlib.compress(bytes(3_000_000))),
    "many texts": b"".join(chunk(b"tEXt", b"k%02d\0" % number + b"x" * 3_300_000) for number in range(21)),
    "checksum": chunk(b"tEXt", b"Software\0paint", damage=1),
    "short gamma": chunk(b"gAMA", b"\0"),
    "damaged orientation": chunk(b"eXIf", b"MM\0*\0\0\0\x08", damage=1),
    "no orientation": chunk(b"eXIf", b"II*\0" + b"\xff" * 500),
}


@pytest.mark.parametrize("kind", REFUSED_METADATA)
@pytest.mark.parametrize("place", [33, -12], ids=["before", "after"])  # the pixels
def test_metadata_that_pillow_refuses_are_passed_over(tmp_path, kind, place):
    path, stream = tmp_path / "image.png", io.BytesIO()
    turned = Image.Exif()
    turned[0x0112] = 6  # shown after a turn by 90 degrees to the right
    Image.fromarray(RGB).save(stream, "PNG", exif=turned if "orientation" not in kind else None)
    whole = stream.getvalue()
    path.write_bytes(whole[:place] + REFUSED_METADATA[kind] + whole[place:])
    expected = RGB if "orientation" in kind else np.rot90(RGB, -1)
    np.testing.assert_array_equal(pixels(path), expected)
    np.testing.assert_array_equal(of_files(make_decoder("cpu", 32))(str(path)), expected)
    assert header_size(path.read_bytes()) in ((11, 17), (17, 11))


def test_the_pixels_of_a_png_are_not_passed_over(tmp_path):
    """Its transparent colour, and damage to the data."""
    path, stream = tmp_path / "image.png", io.BytesIO()
    Image.fromarray(RGB).save(stream, "PNG", transparency=tuple(map(int, RGB[0, 0])))
    whole = stream.getvalue()
    path.write_bytes(whole[:33] + REFUSED_METADATA["profile"] + whole[33:])
    assert (pixels(path)[0, 0] == 255).all()
    broken = whole.index(b"IDAT") + 20
    path.write_bytes(whole[:33] + REFUSED_METADATA["profile"] + whole[33:broken] + b"\xff" * 9 + whole[broken + 9 :])
    with pytest.raises(ImageError, match=r"broken|data stream|decoding"):
        open_file(path)


@pytest.mark.parametrize("suffix", ["jpg", "webp", "png", "tif"])
def test_exif_that_cannot_be_read_turns_nothing(tmp_path, suffix):
    path = tmp_path / f"image.{suffix}"
    options = {} if suffix == "tif" else {"exif": b"Exif\0\0II*\0" + b"\xff" * 40, "lossless": True}
    Image.fromarray(RGB).save(path, **options)
    assert np.asarray(open_file(path)).shape == RGB.shape
    assert of_files(make_decoder("cpu", 32))(str(path)).shape == RGB.shape


def paths_of_two_classes(root, count: int = 2) -> Iterator[Path]:
    """Make the folders of classes a and b; yield the paths of so many images of each."""
    for name in ("a", "b"):
        (root / name).mkdir()
        yield from (root / name / f"{number}.png" for number in range(count))


@pytest.mark.parametrize(("suffix", "format"), [("jfif", "JPEG"), ("jpe", "JPEG"), ("avif", "AVIF"), ("heic", "HEIF")])
def test_files_of_other_names_are_read_or_named_with_a_cure(tmp_path, suffix, format):
    here = {"JPEG": True, "AVIF": features.check("avif"), "HEIF": find_spec("pillow_heif") is not None}[format]
    for place in paths_of_two_classes(tmp_path):
        Image.new("RGB", (16, 16)).save(place)
        path = place.with_name(f"photo.{suffix}")
        if here:
            pillow_formats()
            Image.fromarray(np.full((16, 16, 3), 99, np.uint8)).save(path, format)
        else:
            path.write_bytes(b"\0\0\0\x20ftyp" + {"AVIF": b"avif", "HEIF": b"heic"}[format] + bytes(50))
    pair = load_data(DataOptions(data=str(tmp_path)))
    assert len(pair.train) + len(pair.val) == (6 if here else 4)
    if here:
        np.testing.assert_allclose(pixels(path), 99, atol=2)
        assert not any(suffix in note for note in pair.notes)
        return
    with pytest.raises(ImageError, match=f"a file of {format}: pip install"):
        open_file(path)
    assert f"2 .{suffix} files could be read: {CURES[f'.{suffix}']}" in pair.notes


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path):
    Image.new("RGB", (100, 60)).save(tmp_path / "image.png")
    assert open_file(tmp_path / "image.png", max_pixels=6000).size == (100, 60)
    (tmp_path / "image.png").write_bytes((tmp_path / "image.png").read_bytes()[:60])  # decoding would say "truncated"
    with pytest.raises(ImageError, match="6,000 pixels, more than"):
        open_file(tmp_path / "image.png", max_pixels=5999)


def _of_12_bits(path, kind):
    values = np.linspace(0, 4095, 32 * 32).astype(np.uint16).reshape(32, 32)
    values[0, 0] = 4095
    if kind == "colours":
        rows = b"".join(b"\0" + row.repeat(3).astype(">u2").tobytes() for row in values)
        write_png(path, 32, 32, bit_depth=16, colour_type=2, rows=rows)
    else:
        Image.fromarray(values.astype(kind)).save(path)


@pytest.mark.parametrize(
    ("suffix", "kind", "largest"),
    [("png", np.uint16, 4095), ("tif", np.uint16, 4095), ("tif", np.int32, 4095), ("png", "colours", 15 << 8)],
)
def test_values_that_fill_little_of_their_range_are_noted_once(tmp_path, suffix, kind, largest):
    for path in paths_of_two_classes(tmp_path, count=5):
        _of_12_bits(path.with_suffix(f".{suffix}"), kind)
        Image.fromarray(RGB).save(path.with_suffix(".jpg"))
    options = DataOptions(data=str(tmp_path), image_size=16)
    (note,) = load_data(options).notes
    assert f"of more than 8 bits is {largest} of 65535" in note
    assert "--decode numbers" in note
    if kind != "colours":
        for path in tmp_path.rglob("*.jpg"):
            path.unlink()
        assert load_data(replace(options, decode="numbers", image_channels=1)).notes == []
        bright = np.full((32, 32), 8192, kind)  # an eighth
        Image.fromarray(bright).save(tmp_path / "a" / f"0.{suffix}")
        Image.fromarray(bright).save(tmp_path / "a" / f"1.{suffix}")
        assert load_data(replace(options, val_fraction=0.1)).notes == []


def test_a_photograph_of_108_megapixels_is_read_up_to_the_limit_of_one_flag(tmp_path):
    for path in paths_of_two_classes(tmp_path):
        Image.fromarray(RGB).save(path)
    Image.new("L", (12_000, 9_000), 90).save(tmp_path / "a" / "phone.jpg", quality=20)

    def shape_of_phone(**options):
        for part in load_data(DataOptions(data=str(tmp_path), image_size=32, **options)).parts.values():
            for index in range(len(part)):
                if part.source.name(index).endswith(".jpg"):
                    return tuple(part.source.read(index).shape)

    assert shape_of_phone() == (3, 1125, 1500), "in the memory of its shrunk pixels"
    for decode in ("cpu", "exact"):
        with pytest.raises(ImageError, match="108,000,000 pixels, more than the 107 megapixels of --max-megapixels"):
            shape_of_phone(decode=decode, max_megapixels=107)


def test_the_limit_may_be_above_pillows(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    Image.fromarray(np.zeros((100, 60), np.uint8)).save(tmp_path / "image.png")
    for read in (open_file, of_files(make_decoder("cpu", 16)), of_files(make_decoder("exact", 16))):
        read(str(tmp_path / "image.png"))
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert header_size((tmp_path / "image.png").read_bytes()) == (100, 60)
