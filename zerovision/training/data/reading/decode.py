"""From the bytes of an image file of unknown origin to 8-bit pixels: at full size, or shrunk while decoding.

Shrinking depends on the file and the image size S only, not on the crop: by 1, 1/2, 1/4 or 1/8, the smallest whose
shorter side is still 2 S pixels or more. So a cache of shrunk images contains exactly the pixels that are decoded
without one. JPEG files are shrunk by libjpeg-turbo's scaled inverse DCT, which saves most of the work; other files are
decoded by Pillow and averaged over blocks. Pillow also decides about every file in which libjpeg-turbo finds anything
unusual.

Pillow's defaults are not enough for training data: they clip 16-bit values, ignore the EXIF orientation, return the
first frame of an animation silently, only warn of a decompression bomb, and `verify()` passes truncated files. So every
file is decoded completely here.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import simplejpeg
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from zerovision.training.base.errors import UserError
from zerovision.training.data.augment import BoxChooser
from zerovision.training.data.reading.formats import Refused, pillow_formats, unknown_format, without_metadata
from zerovision.training.data.reading.native import crop_jpeg
from zerovision.training.data.settings import MAX_MEGAPIXELS

Decoder = Callable[..., np.ndarray]
"""`decode` or `image_numbers.decode_numbers` with their options: from the file, a chooser of a part and a list for
notes."""
Decoded = TypeVar("Decoded")

MAX_PIXELS = MAX_MEGAPIXELS * 10**6
CHANNEL_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's names by number of channels
SCALE_NUMERATORS = (1, 2, 4)  # of eighths; the others that libjpeg-turbo has are slower than the work they save
# A phone's "multi-picture" JPEG contains the photo first, then previews and depth maps: no animation.
_FORMATS_WITH_EXTRA_PICTURES = ("MPO",)
_ORIENTATION = 0x0112  # of EXIF
_START_OF_JPEG, _APP1, _END_OF_JPEG = b"\xff\xd8", b"\xff\xe1", b"\xff\xd9"
# of TIFF 6.0
BITS_PER_SAMPLE, _PLANAR_CONFIGURATION, _PHOTOMETRIC_INTERPRETATION, _WHITE_IS_ZERO = 258, 284, 262, 0


def make_decoder(name: str, image_size: int, channels: int = 3, max_pixels: int = MAX_PIXELS) -> Decoder:
    """Return the decoder `name` of `settings.DECODERS`, for images that the model sees at `image_size`.

    Args:
        name: Of the decoder.
        image_size: In pixels.
        channels: 1 (grey), 3 (RGB) or 4 (RGBA).
        max_pixels: Most pixels of a file; one with more is refused before it is decoded.

    Raises:
        UserError: Another number of channels.
    """
    if channels not in CHANNEL_MODES:
        raise UserError(
            f"image files are read as 1 (grey), 3 (RGB) or 4 (RGBA) channels, not as {channels} (--image-channels): "
            "put others into .npy files, for --decode numbers, or into arrays, --data npz:FILE."
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
    """Return an image, or the part that `choose` takes of it: uint8 [h, w, C]; the same file gives the same pixels.

    Args:
        data: The file.
        choose: Takes a part of the image; of a JPEG only that is decoded, if it is safe.
        notes: Gets what is odd about an image that can be used.
        shrink_to: The image size that it is shrunk for, as far as that allows; 0: every pixel is decoded.
        channels: A key of `CHANNEL_MODES`.
        max_pixels: Most pixels (width x height) that the header may declare; checked before decoding.

    Raises:
        Refused: Not an image, truncated, more than `max_pixels`, or values of unknown scale.
    """
    notes = [] if notes is None else notes
    pixels = _decode_jpeg(data, choose, notes, shrink_to, max_pixels) if shrink_to else None
    if pixels is None:
        image = open_image(data, channels, max_pixels, notes)
        return crop(reduced(image, shrink_to) if shrink_to else pixels_of(image), choose)
    return pixels if channels == 3 else pixels_of(Image.fromarray(pixels).convert(CHANNEL_MODES[channels]))


def _decode_jpeg(
    data: bytes, choose: BoxChooser | None, notes: list[str], shrink_to: int, max_pixels: int
) -> np.ndarray | None:
    """Decode a JPEG of grey or of three colours by libjpeg-turbo: uint8 [h, w, 3]; None if Pillow has to."""
    try:
        full_height, full_width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:  # also of no JPEG
        return None
    if space in ("CMYK", "YCCK") or full_height * full_width > max_pixels:
        return None
    numerator = scale_numerator(full_height, full_width, shrink_to)
    height, width = (-(-side * numerator // 8) for side in (full_height, full_width))  # libjpeg rounds up
    orientation = _orientation(data, max_pixels) if _APP1 in data else 1
    # Without an end it is truncated, and only decoding all of it shows where.
    if choose is not None and orientation == 1 and data.endswith(_END_OF_JPEG):
        part = crop_jpeg(data, numerator, choose(height, width))
        if part is not None:
            return part
    try:
        pixels = simplejpeg.decode_jpeg(data, min_height=height, min_width=width)
    except ValueError as warning:
        open_image(data, 3, max_pixels)  # refuses a truncated one
        try:
            pixels = simplejpeg.decode_jpeg(data, min_height=height, min_width=width, strict=False)
        except ValueError:
            return None
        notes.append(f"libjpeg: {warning}")
    if pixels.shape[:2] != (height, width):
        return None
    if orientation != 1:
        image = Image.fromarray(pixels)
        image.getexif()[_ORIENTATION] = orientation
        pixels = np.array(ImageOps.exif_transpose(image))
    return crop(pixels, choose)


def _orientation(data: bytes, max_pixels: int) -> int:
    try:
        with opened(data, max_pixels) as image:
            orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # as in `load`, which ends up with upright pixels too
        return 1
    return orientation if orientation in range(1, 9) else 1


def header_size(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return height and width of an image in pixels, by the file's header.

    Raises:
        Refused: There is no header.
    """
    try:
        with opened(without_metadata(data), max_pixels) as image:
            return image.height, image.width
    except Exception as error:  # as in `load`: Pillow raises nearly every type
        raise Refused(str(error) or type(error).__name__) from None


def shrunk_bytes(height: int, width: int, image_size: int, channels: int = 3) -> int:
    """Return the size of the image that `decode` gives of one with these sides, shrunk to `image_size`, in bytes."""
    numerator = scale_numerator(height, width, image_size)
    return channels * -(-height * numerator // 8) * -(-width * numerator // 8)


def crop(pixels: np.ndarray, choose: BoxChooser | None) -> np.ndarray:
    """Return the part of uint8 [H, W, C] that `choose` takes, as a view; all of it if `choose` is None."""
    if choose is None:
        return pixels
    top, left, height, width = choose(*pixels.shape[:2])
    return pixels[top : top + height, left : left + width]


def scale_numerator(height: int, width: int, image_size: int) -> int:
    """Return the scale of an image in eighths, 1, 2, 4 or 8: that of Pillow's `draft` to twice the image size."""
    shorter = min(height, width)
    return next((n for n in SCALE_NUMERATORS if shorter * n // 8 >= 2 * image_size), 8)


def pixels_of(image: Image.Image) -> np.ndarray:
    """Return the pixels of an 8-bit image, uint8 [H, W, C]."""
    return np.atleast_3d(np.array(image))


def reduced(image: Image.Image, image_size: int) -> np.ndarray:
    """Return the pixels of an 8-bit image, averaged over blocks: uint8 [h, w, C]."""
    numerator = scale_numerator(image.height, image.width, image_size)
    return pixels_of(image if numerator == 8 else image.reduce(8 // numerator))


def open_image(
    data: bytes, channels: int = 3, max_pixels: int = MAX_PIXELS, notes: list[str] | None = None
) -> Image.Image:
    """Decode an image completely, upright and as `to_channels`; the arguments and errors are those of `decode`.

    A format is told by the content, one of `pillow_formats`. Of several frames or pages the first is used.
    """
    return load(data, max_pixels, lambda image: to_channels(image, channels), notes)


def opened(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open a file of one of `pillow_formats`, without decoding it; up to `max_pixels` Pillow takes it for no bomb."""
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    return Image.open(io.BytesIO(data), formats=pillow_formats())


def load(
    data: bytes, max_pixels: int, convert: Callable[[Image.Image], Decoded], notes: list[str] | None = None
) -> Decoded:
    """Return what `convert` makes of an image that is decoded completely, upright; raise Refused as `decode`."""
    notes = [] if notes is None else notes
    try:
        return _load(data, max_pixels, convert, notes)
    except Exception as error:  # Pillow's decoders raise nearly every type on damaged files
        pixels_alone, reason = without_metadata(data), _reason(error, data, max_pixels)
        if pixels_alone is data:
            raise Refused(reason) from None
    try:
        decoded = _load(pixels_alone, max_pixels, convert, notes)
    except Exception as again:
        raise Refused(_reason(again, data, max_pixels)) from None
    notes.append(f"metadata passed over: {reason}")
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
    if tags.get(_PLANAR_CONFIGURATION) == 2 and len(bits) > 1 and max(bits) > 8:
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


def is_deep_grey(image: Image.Image) -> bool:
    """Whether an image is grey of more than 8 bits."""
    return image.mode == "F" or image.mode.startswith("I")


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Convert an image of any mode to 8 bits, grey (`channels` 1), RGB (3) or RGBA (4).

    Grey of 12 or 16 bits is scaled from its full range; floats are expected in 0..1; transparent pixels are composited
    on white, except for RGBA. Grey is that of ITU-R BT.601 (0.299 red + 0.587 green + 0.114 blue).

    Raises:
        ValueError: The scale of its pixels is unknown.
    """
    if is_deep_grey(image):
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
    values, white, is_inverted = np.asarray(image), white_of(image), False
    if isinstance(image, TiffImageFile) and image.mode.startswith("I;16"):
        is_inverted = image.tag_v2.get(_PHOTOMETRIC_INTERPRETATION) == _WHITE_IS_ZERO
    grey = Image.fromarray(_to_8_bit(white - values if is_inverted else values, image.mode, white))
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


def white_of(image: Image.Image) -> int:
    """Return which number of a grey image of more than 8 bits becomes white."""
    if isinstance(image, TiffImageFile) and image.mode.startswith("I;16"):
        return 2 ** image.tag_v2.get(BITS_PER_SAMPLE, (16,))[0] - 1  # 12 bits come in a container of 16
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
