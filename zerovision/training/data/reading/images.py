"""Opens an image file of unknown origin and returns 8-bit pixels, or raises an error of one line.

Pillow's defaults are not enough for training data: they clip 16-bit values, ignore the EXIF orientation, return the
first frame of an animation silently, only warn of a decompression bomb, and `verify()` passes truncated files. So every
file is decoded completely here, and `read_file` is the only place where the bytes of image files are read.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from zerovision.training.base.errors import UserError
from zerovision.training.data.reading.formats import ARRAY_EXTENSION, pillow_formats, unknown_format, without_metadata
from zerovision.training.data.reading.image_notes import add_notes
from zerovision.training.data.reading.retry import patiently
from zerovision.training.data.settings import MAX_MEGAPIXELS

Decoded = TypeVar("Decoded")

MAX_PIXELS = MAX_MEGAPIXELS * 10**6
BITS_PER_SAMPLE, PLANAR_CONFIGURATION = 258, 284  # tags of TIFF
MAX_FILE_BYTES = 1_500_000_000  # more than MAX_PIXELS take without compression, at 4 channels of 16 bits
CHANNEL_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's names by number of channels
# A phone's "multi-picture" JPEG contains the photo first, then previews and depth maps: no animation.
_FORMATS_WITH_EXTRA_PICTURES = ("MPO",)

# of TIFF 6.0
_PNG_BITS = 24  # where a PNG has the bits of a channel
_BITS_PER_SAMPLE, _PHOTOMETRIC_INTERPRETATION, _WHITE_IS_ZERO = 258, 262, 0


class ImageError(UserError):
    """An image that cannot be used.

    Attributes:
        path: The file, or the position of the image in a data set that is no folder of files.
        reason: One line.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = os.fspath(path)
        self.reason = " ".join(reason.split())
        super().__init__(
            f"cannot use image {self.path!r}: {self.reason}. Repair or remove it, or add --bad-images skip."
        )


def read_file(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file, without waiting for a FIFO or reading a device.

    Raises:
        ImageError: The file is missing, not a regular one, or larger than `max_bytes`.
        FileServerError: It cannot be read now, see `patiently`.
    """
    try:
        return patiently(lambda: _content(path, max_bytes), path)
    except OSError as error:
        raise ImageError(path, error.strerror or str(error)) from None
    except ValueError as error:  # a null character in the name
        raise ImageError(path, str(error)) from None


def _content(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    # without O_NONBLOCK, opening a FIFO without a writer blocks for ever
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise ImageError(path, "a directory, not a file")
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(path, "not a regular file, but a device, a FIFO or a socket")
        if status.st_size > max_bytes:
            raise ImageError(path, f"{status.st_size / 1e6:.0f} MB, more than the {max_bytes / 1e6:g} MB allowed")
        data = file.read(status.st_size + 1)
    if len(data) > status.st_size:  # such as files below /proc, whose size is given as 0
        raise ImageError(path, f"contains more than the {status.st_size} bytes that the file system gives as its size")
    return data


def open_image(
    path: str | os.PathLike[str], max_pixels: int = MAX_PIXELS, data: bytes | None = None, channels: int = 3
) -> Image.Image:
    """Decode the image at `path` completely; anything odd about it is added as a note, see `image_notes`.

    The EXIF orientation is applied; see `to_channels` for the colours. Of several frames or pages the first is used.

    Args:
        path: A file of one of `pillow_formats`, detected by its content, not by its name.
        max_pixels: Most pixels (width x height) that the header may declare; checked before decoding.
        data: The content of the file, if it was read before.
        channels: A key of `CHANNEL_MODES`.

    Returns:
        A Pillow image of that mode.

    Raises:
        ImageError: Not an image, truncated, more than `max_pixels`, or values of unknown scale.
    """
    return _decode(path, data, max_pixels, lambda image: to_channels(image, channels))


def opened(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open a file of one of `pillow_formats`, without decoding it; up to `max_pixels` Pillow takes it for no bomb."""
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    return Image.open(io.BytesIO(data), formats=pillow_formats())


def open_numbers(path: str | os.PathLike[str], data: bytes | None = None, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """As `open_image`, but return the numbers that the file contains, [H, W] or [H, W, C], of the type that they have.

    Colours of a palette and the like are read as RGB. Pillow has more than 8 bits for grey images alone: colours of
    more are refused.
    """
    content = read_file(path) if data is None else data

    def numbers_of(image: Image.Image) -> np.ndarray:
        is_grey, bits = _is_deep_grey(image), _bits_of(image, content)
        if bits > 8 and not is_grey:
            raise ValueError(f"colours of {bits} bits, which Pillow reads as 8: save it as {ARRAY_EXTENSION}")
        return np.array(image if is_grey or image.mode in CHANNEL_MODES.values() else image.convert("RGB"))

    return _decode(path, content, max_pixels, numbers_of)


def whole_range(path: str, data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int] | None:
    """Return the largest number of an image of whole numbers of more than 8 bits, and which one becomes white.

    Of colours Pillow reads the upper 8 bits alone. None of any other image, and of one that cannot be read.
    """

    def largest(image: Image.Image) -> tuple[int, int]:
        if _is_deep_grey(image):
            return int(np.asarray(image).max()), _white_of(image)
        return int(np.asarray(image.convert("RGB")).max()) << 8, 65535

    try:
        with opened(data, max_pixels) as image:
            is_deep = image.mode != "F" and (_is_deep_grey(image) or _bits_of(image, data) > 8)
        return _decode(path, data, max_pixels, largest) if is_deep else None
    except Exception:  # nearly every type of damaged files, which the loader reports
        return None


def _is_deep_grey(image: Image.Image) -> bool:
    return image.mode == "F" or image.mode.startswith("I")


def _bits_of(image: Image.Image, content: bytes) -> int:
    """Return the bits of a channel of a PNG or TIFF file, 8 of any other."""
    if isinstance(image, TiffImageFile):
        return max(image.tag_v2.get(_BITS_PER_SAMPLE, (8,)))
    return content[_PNG_BITS] if image.format == "PNG" else 8


def _decode(
    path: str | os.PathLike[str], data: bytes | None, max_pixels: int, convert: Callable[[Image.Image], Decoded]
) -> Decoded:
    content = read_file(path) if data is None else data
    notes: list[str] = []
    try:
        decoded = _load(content, max_pixels, convert, notes)
    except Exception as error:  # Pillow's decoders raise nearly every type on damaged files
        pixels_alone, reason = without_metadata(content), _reason(error, content, max_pixels)
        if pixels_alone is content:
            raise ImageError(path, reason) from None
        try:
            decoded = _load(pixels_alone, max_pixels, convert, notes)
        except Exception as again:
            raise ImageError(path, _reason(again, content, max_pixels)) from None
        notes.append(f"metadata passed over: {reason}")
    add_notes(path, notes)
    return decoded


def _load(content: bytes, max_pixels: int, convert: Callable[[Image.Image], Decoded], notes: list[str]) -> Decoded:
    with opened(content, max_pixels) as image:
        _check_header(image, max_pixels)
        if getattr(image, "is_animated", False) and image.format not in _FORMATS_WITH_EXTRA_PICTURES:
            notes.append("several frames or pages, the first is used")
        _scale_transparent_colour(image)
        image.load()
        try:
            ImageOps.exif_transpose(image, in_place=True)
        except MemoryError:
            raise
        except Exception as error:
            notes.append(f"EXIF passed over: {error}")
        return convert(image)


def _reason(problem: Exception, content: bytes, max_pixels: int) -> str:
    if isinstance(problem, Image.UnidentifiedImageError):
        return unknown_format(content)
    if isinstance(problem, Image.DecompressionBombError):
        found = re.search(r"\d+", str(problem))
        return _too_many(int(found[0]) if found else 0, max_pixels)
    return str(problem) or type(problem).__name__


def _too_many(pixels: int, max_pixels: int) -> str:
    return f"{pixels:,} pixels, more than the {max_pixels / 1e6:g} megapixels of --max-megapixels"


def _check_header(image: Image.Image, max_pixels: int) -> None:
    if image.width * image.height > max_pixels:
        raise ValueError(_too_many(image.width * image.height, max_pixels))
    tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    bits = tags.get(BITS_PER_SAMPLE, ())
    if tags.get(PLANAR_CONFIGURATION) == 2 and len(bits) > 1 and max(bits) > 8:
        raise ValueError("more than 8 bits in separate planes, which Pillow does not read: save it otherwise")


# From the values of a PNG to the 8 bits that Pillow converts them to, for the raw modes in which it does not convert
# the transparent colour.
_SCALED_TO_8_BITS = {
    "L;2": lambda level: level * 85,
    "L;4": lambda level: level * 17,
    "RGB;16B": lambda colour: tuple(level >> 8 for level in colour),
}


def _scale_transparent_colour(image: Image.Image) -> None:
    """Convert the transparent colour of a PNG to the depth that its pixels will have; before they are loaded."""
    transparent = image.info.get("transparency")
    if isinstance(image, PngImageFile) and transparent is not None and image.tile:
        scale = _SCALED_TO_8_BITS.get(str(image.tile[0].args), lambda colour: colour)
        image.info["transparency"] = scale(transparent)


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Convert an image of any mode to 8 bits, grey (`channels` 1), RGB (3) or RGBA (4).

    Grey of 12 or 16 bits is scaled from its full range; floats are expected in 0..1; transparent pixels are composited
    on white, except for RGBA. Grey is that of ITU-R BT.601 (0.299 red + 0.587 green + 0.114 blue).

    Raises:
        ValueError: The scale of its pixels is unknown.
    """
    if _is_deep_grey(image):
        image = _deep_grey(image)
    mode = CHANNEL_MODES[channels]
    if image.has_transparency_data and mode != "RGBA":
        layers = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), layers).convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def _deep_grey(image: Image.Image) -> Image.Image:
    """Convert grey of more than 8 bits to mode L, or LA if one of its levels is transparent.

    Raises:
        ValueError: The scale of its pixels is unknown.
    """
    values, white, is_inverted = np.asarray(image), _white_of(image), False
    if isinstance(image, TiffImageFile) and image.mode.startswith("I;16"):
        is_inverted = image.tag_v2.get(_PHOTOMETRIC_INTERPRETATION) == _WHITE_IS_ZERO
    grey = Image.fromarray(_to_8_bit(white - values if is_inverted else values, image.mode, white))
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


def _white_of(image: Image.Image) -> int:
    """Return which number of a grey image of more than 8 bits becomes white."""
    if isinstance(image, TiffImageFile) and image.mode.startswith("I;16"):
        return 2 ** image.tag_v2.get(_BITS_PER_SAMPLE, (16,))[0] - 1  # 12 bits come in a container of 16
    return 65535


def _to_8_bit(values: np.ndarray, mode: str, white: int) -> np.ndarray:
    """Scale grey values [H, W] of Pillow's `mode` to uint8, `white` to 255; ValueError if the scale is unknown."""
    low, high = values.min(), values.max()
    if mode == "F":
        if not (low >= 0 and high <= 1):  # also false for NaN
            raise ValueError(f"float pixels from {low:g} to {high:g}, only 0 to 1 has a known scale")
        return np.rint(values * 255).astype(np.uint8)
    if low < 0 or high > white:
        raise ValueError(f"integer pixels from {low} to {high}, only 0 to {white} has a known scale")
    return np.rint(values / (white / 255)).astype(np.uint8)
