"""Decodes untrusted image files to 8-bit pixels, at full size or shrunk while decoding.

For models with images of size S, the scale is the smallest of 1/8, 1/4, 1/2 and 1 at which the shorter side has at
least 2 S pixels. The scale depends only on the file and on S, not on the crop, so a cache of shrunk images contains
exactly the pixels that are decoded without a cache. JPEG files are shrunk by libjpeg-turbo's scaled inverse DCT, which
saves most of the work; other files are decoded by Pillow and averaged over blocks. Pillow also handles every file in
which libjpeg-turbo finds anything unusual.

Pillow's defaults are not strict enough for training data: they clip 16-bit values, ignore the EXIF orientation,
silently return the first frame of an animation and only warn about decompression bombs, and `verify()` accepts
truncated files. Therefore every file is decoded completely here.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from zerovision.training.base.errors import UserError
from zerovision.training.data.augment import BoxChooser
from zerovision.training.data.reading.files import Refused, pillow_formats, unknown_format, without_metadata
from zerovision.training.data.reading.native import crop_jpeg
from zerovision.training.data.settings import MAX_MEGAPIXELS

# `decode` or `image_numbers.decode_numbers` with options set; takes a file's contents, a `BoxChooser`, and a list for
# notes.
Decoder = Callable[..., np.ndarray]
Decoded = TypeVar("Decoded")
Pixels = TypeVar("Pixels", np.ndarray, torch.Tensor)

MAX_PIXELS = MAX_MEGAPIXELS * 10**6
CHANNEL_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's names by number of channels
SCALE_NUMERATORS = (1, 2, 4)  # in eighths; libjpeg-turbo's other scales cost more time than they save
# A phone's "multi-picture" JPEG contains the photo, then previews and depth maps, so it is not an animation.
_FORMATS_WITH_EXTRA_PICTURES = ("MPO",)
_ORIENTATION = 0x0112  # of EXIF
_BROKEN_EXIF = (SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, OSError, struct.error)
_APP1, _END_OF_JPEG = b"\xff\xe1", b"\xff\xd9"
# of TIFF 6.0
BITS_PER_SAMPLE, _PLANAR_CONFIGURATION, _PHOTOMETRIC_INTERPRETATION, _WHITE_IS_ZERO = 258, 284, 262, 0


def make_decoder(name: str, image_size: int, channels: int = 3, max_pixels: int = MAX_PIXELS) -> Decoder:
    """Return the decoder `name` of `settings.DECODERS` for models with images of `image_size`, or raise a UserError."""
    if channels not in CHANNEL_MODES:
        raise UserError(
            f"--image-channels {channels}: image files have 1 (gray), 3 (RGB) or 4 (RGBA) channels: for others, use "
            ".npy files (--decode numbers) or arrays (--data npz:FILE)."
        )
    return partial(decode, shrink_to=image_size if name == "cpu" else 0, channels=channels, max_pixels=max_pixels)


def decode(
    data: bytes,
    choose: BoxChooser | None = None,
    notes: list[str] | None = None,
    *,
    shrink_to: int = 0,
    channels: int = 3,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Return an image, or the part that `choose` selects: uint8 [h, w, C], always the same pixels for the same file.

    If possible, the image is shrunk for a model with images of size `shrink_to` (0 to decode every pixel), and only the
    chosen part of a JPEG is decoded. Notes on an unusual but usable image are added to `notes`.

    Raise Refused if the file is not an image, is truncated, declares more than `max_pixels` (checked before decoding),
    or has values of unknown scale.
    """
    pixels = None
    if shrink_to:
        with suppress(ValueError):  # if it is no JPEG, or an unusual one, Pillow decodes it
            pixels = _decode_jpeg(data, choose, [] if notes is None else notes, shrink_to, max_pixels)
    if pixels is None:
        image = load(data, max_pixels, partial(to_channels, channels=channels), notes)
        return crop(reduced(image, shrink_to), choose)
    return pixels if channels == 3 else reduced(Image.fromarray(pixels).convert(CHANNEL_MODES[channels]))


def _decode_jpeg(
    data: bytes, choose: BoxChooser | None, notes: list[str], shrink_to: int, max_pixels: int
) -> np.ndarray | None:
    """Decode a gray or three-color JPEG with libjpeg-turbo to uint8 [h, w, 3].

    If this fails, return None or raise ValueError; if the file is truncated, raise Refused.
    """
    full_height, full_width, space, _ = simplejpeg.decode_jpeg_header(data)
    if space in ("CMYK", "YCCK") or full_height * full_width > max_pixels:
        return None
    numerator = scale_numerator(full_height, full_width, shrink_to)
    height, width = (-(-side * numerator // 8) for side in (full_height, full_width))  # libjpeg rounds up
    orientation = 1
    if _APP1 in data:
        with suppress(Refused), opened(data, max_pixels) as header:
            given: Any = header.getexif().get(_ORIENTATION)
            orientation = given if given in range(1, 9) else 1
    # Without an end marker the file is truncated, and only decoding all of it shows where.
    if choose is not None and orientation == 1 and data.endswith(_END_OF_JPEG):
        part = crop_jpeg(data, numerator, choose(height, width))
        if part is not None:
            return part
    try:
        pixels = simplejpeg.decode_jpeg(data, min_height=height, min_width=width)
    except ValueError as warning:
        load(data, max_pixels, lambda image: image)  # rejects a truncated file
        pixels = simplejpeg.decode_jpeg(data, min_height=height, min_width=width, strict=False)
        notes.append(f"libjpeg: {warning}")
    if pixels.shape[:2] != (height, width):
        return None
    if orientation != 1:
        image = Image.fromarray(pixels)
        image.getexif()[_ORIENTATION] = orientation
        pixels = np.array(ImageOps.exif_transpose(image))
    return crop(pixels, choose)


def header_size(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return the height and width of an image in pixels, from the file's header, or raise Refused."""
    with opened(data, max_pixels) as image:
        return image.height, image.width


def shrunk_bytes(height: int, width: int, image_size: int, channels: int = 3) -> int:
    """Return the size in bytes of an image with these sides after `decode` shrinks it for `image_size`."""
    numerator = scale_numerator(height, width, image_size)
    return channels * -(-height * numerator // 8) * -(-width * numerator // 8)


def crop(pixels: Pixels, choose: BoxChooser | None) -> Pixels:
    """Return the part of an image [H, W, C] that `choose` selects, as a view; the whole image if `choose` is None."""
    if choose is None:
        return pixels
    top, left, height, width = choose(*pixels.shape[:2])
    return pixels[top : top + height, left : left + width]


def scale_numerator(height: int, width: int, image_size: int) -> int:
    """Return the scale of an image in eighths (1, 2, 4 or 8), as in Pillow's `draft` with twice the image size."""
    return next((n for n in SCALE_NUMERATORS if image_size and min(height, width) * n // 8 >= 2 * image_size), 8)


def reduced(image: Image.Image, image_size: int = 0) -> np.ndarray:
    """Return the pixels of an 8-bit image, averaged over blocks unless `image_size` is 0: uint8 [h, w, C]."""
    numerator = scale_numerator(image.height, image.width, image_size)
    return np.atleast_3d(np.array(image if numerator == 8 else image.reduce(8 // numerator)))


@contextmanager
def opened(data: bytes, max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """Open an image in one of the `pillow_formats` from the file's contents, without decoding it.

    Images of up to `max_pixels` are not treated as decompression bombs. Any exception in the block is converted to
    Refused.
    """
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    try:
        with Image.open(io.BytesIO(without_metadata(data)), formats=pillow_formats()) as image:
            yield image
    except Exception as error:  # damaged files make Pillow raise nearly any exception
        reason = str(error) or type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = unknown_format(data)
        elif isinstance(error, Image.DecompressionBombError) and (found := re.search(r"\d+", reason)):
            reason = _too_many(int(found[0]), max_pixels)
        raise Refused(reason) from None


# How Pillow converts the values of a PNG to 8 bits when it loads them, for the raw modes in which it does not convert
# the transparent color.
_SCALED_TO_8_BITS = {
    "L;2": lambda level: level * 85,
    "L;4": lambda level: level * 17,
    "RGB;16B": lambda colour: tuple(level >> 8 for level in colour),
}


def load(
    data: bytes, max_pixels: int, convert: Callable[[Image.Image], Decoded], notes: list[str] | None = None
) -> Decoded:
    """Decode an image completely, turn it upright, and return the result of `convert`; for errors, see `decode`.

    If there are several frames or pages, the first is used.
    """
    with opened(data, max_pixels) as image:
        if image.width * image.height > max_pixels:
            raise Refused(_too_many(image.width * image.height, max_pixels))
        tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
        bits = tags.get(BITS_PER_SAMPLE, ())
        if tags.get(_PLANAR_CONFIGURATION) == 2 and len(bits) > 1 and max(bits) > 8:
            raise Refused("more than 8 bits in separate planes, which Pillow does not read: save it in another format")
        is_animated = getattr(image, "is_animated", False) and image.format not in _FORMATS_WITH_EXTRA_PICTURES
        if notes is not None and is_animated:
            notes.append("several frames or pages: the first is used")
        # the transparent color gets the bit depth that the pixels will have once they are loaded
        raw_mode = str(image.tile[0].args) if isinstance(image, PngImageFile) and image.tile else ""
        if raw_mode in _SCALED_TO_8_BITS and "transparency" in image.info:
            image.info["transparency"] = _SCALED_TO_8_BITS[raw_mode](image.info["transparency"])
        image.load()
        with suppress(*_BROKEN_EXIF):
            ImageOps.exif_transpose(image, in_place=True)
        return convert(image)


def _too_many(pixels: int, max_pixels: int) -> str:
    return f"{pixels:,} pixels, more than the {max_pixels / 1e6:g} megapixels of --max-megapixels"


def is_deep_grey(image: Image.Image) -> bool:
    """Return whether an image is gray with more than 8 bits."""
    return image.mode == "F" or image.mode.startswith("I")


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Convert an image of any mode to 8 bits: gray (`channels` 1), RGB (3) or RGBA (4), or raise Refused.

    12- and 16-bit gray is scaled from its full range; floats must be in 0..1; transparent pixels are composited onto
    white, except for RGBA. Gray follows ITU-R BT.601 (0.299 red + 0.587 green + 0.114 blue).
    """
    if is_deep_grey(image):
        image = _deep_grey(image)
    mode = CHANNEL_MODES[channels]
    if image.has_transparency_data and mode != "RGBA":
        layers = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), layers).convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def _deep_grey(image: Image.Image) -> Image.Image:
    """Convert gray of more than 8 bits to mode L, or to LA if one of its levels is transparent, or raise Refused."""
    values, white = np.asarray(image), white_of(image)
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= white):  # also true for NaN
        raise Refused(f"pixels from {low:g} to {high:g}; only 0 to {white} has a known scale")
    is_inverted = _tag(image, _PHOTOMETRIC_INTERPRETATION) == _WHITE_IS_ZERO
    grey = Image.fromarray(np.rint((white - values if is_inverted else values) * (255 / white)).astype(np.uint8))
    if (transparent := image.info.get("transparency")) is not None:
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


def white_of(image: Image.Image) -> int:
    """Return the value that becomes white in a gray image with more than 8 bits."""
    bits = _tag(image, BITS_PER_SAMPLE)
    return 1 if image.mode == "F" else 2 ** (bits[0] if bits else 16) - 1  # 12 bits are stored in 16


def _tag(image: Image.Image, number: int) -> Any:
    """Return a tag of a gray TIFF with up to 16 bits; None for any other file."""
    if isinstance(image, TiffImageFile) and image.mode.startswith("I;16"):
        return image.tag_v2.get(number)
    return None
