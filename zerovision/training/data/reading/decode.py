"""From an image file to pixels: at full size, or shrunk while decoding.

Shrinking depends on the file and the image size S only, not on the crop: by 1, 1/2, 1/4 or 1/8, the smallest whose
shorter side is still 2 S pixels or more. So a cache of shrunk images contains exactly the pixels that are decoded
without one.

JPEG files are shrunk by libjpeg-turbo's scaled inverse DCT, which saves most of the work; other files are decoded by
Pillow and averaged over blocks. Pillow also decides about every file in which libjpeg-turbo finds anything unusual.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import simplejpeg
from PIL import Image, ImageOps

from zerovision.training.base.errors import UserError
from zerovision.training.data.augment import BoxChooser
from zerovision.training.data.reading.formats import without_metadata
from zerovision.training.data.reading.image_notes import add_notes
from zerovision.training.data.reading.images import CHANNEL_MODES, MAX_PIXELS, ImageError, open_image, opened, read_file
from zerovision.training.data.reading.native import crop_jpeg

SCALE_NUMERATORS = (1, 2, 4)  # of eighths; the others that libjpeg-turbo has are slower than the work they save
_STANDALONE_MARKERS = (0x01, *range(0xD0, 0xD8))  # without a length
_FRAME_MARKERS = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive Huffman coding
_OTHER_FRAME_MARKERS = (0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_START_OF_SCAN, _APP1 = 0xDA, 0xE1
_END_OF_IMAGE = b"\xff\xd9"
_ORIENTATION = 0x0112  # of EXIF


class Decoder(Protocol):
    """Decodes image files; the same file gives the same pixels always."""

    def __call__(self, path: str, choose: BoxChooser | None = None, data: bytes | None = None) -> np.ndarray:
        """Return the image, or the part that `choose` takes of it: uint8 [h, w, C].

        Args:
            path: Of the file.
            choose: Takes a part of the image.
            data: The content of the file, if it was read before.

        Raises:
            ImageError: The image cannot be used.
        """


def make_decoder(name: str, image_size: int, channels: int = 3, max_pixels: int = MAX_PIXELS) -> Decoder:
    """Return the decoder `name` of `settings.DECODERS`, for images that the model sees at `image_size`.

    Args:
        name: Of the decoder.
        image_size: In pixels.
        channels: 1 (grey), 3 (RGB) or 4 (RGBA).
        max_pixels: Most pixels of a file; one with more is an error before it is decoded.

    Raises:
        UserError: Another number of channels.
    """
    if channels not in CHANNEL_MODES:
        raise UserError(
            f"image files are read as 1 (grey), 3 (RGB) or 4 (RGBA) channels, not as {channels} (--image-channels): "
            "put others into .npy files, for --decode numbers, or into arrays, --data npz:FILE."
        )
    decode = partial(decode_shrunk, image_size=image_size) if name == "cpu" else decode_exact
    return partial(decode, channels=channels, max_pixels=max_pixels)


def decode_exact(
    path: str,
    choose: BoxChooser | None = None,
    data: bytes | None = None,
    *,
    channels: int = 3,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Decode every pixel, by Pillow; see `Decoder`."""
    return crop(pixels_of(open_image(path, max_pixels, data, channels)), choose)


def decode_shrunk(
    path: str,
    choose: BoxChooser | None = None,
    data: bytes | None = None,
    *,
    image_size: int,
    channels: int = 3,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Decode the image shrunk as far as `image_size` pixels allow, and of a JPEG only the part if that is safe."""
    data = read_file(path) if data is None else data
    header = jpeg_header(data, max_pixels)
    if header is None:
        return crop(reduced(open_image(path, max_pixels, data, channels), image_size), choose)
    numerator = scale_numerator(header.height, header.width, image_size)
    height, width = (-(-side * numerator // 8) for side in (header.height, header.width))  # libjpeg rounds up
    if choose is not None and header.is_plain:
        part = crop_jpeg(data, numerator, choose(height, width))
        if part is not None:
            return _as_channels(part, channels)
    try:
        pixels = simplejpeg.decode_jpeg(data, min_height=height, min_width=width)
    except ValueError as warning:
        pixels = _read_odd_jpeg(path, data, height, width, str(warning), max_pixels)
    if pixels is None or pixels.shape[:2] != (height, width):
        pixels = reduced(open_image(path, max_pixels, data), image_size)
    elif header.orientation != 1:
        image = Image.fromarray(pixels)
        image.getexif()[_ORIENTATION] = header.orientation
        pixels = np.array(ImageOps.exif_transpose(image))
    return _as_channels(crop(pixels, choose), channels)


def header_size(path: str, data: bytes | None = None, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return height and width of an image in pixels, by the file's header; `data` is its content, if it was read.

    Raises:
        ImageError: There is no header.
    """
    data = without_metadata(read_file(path) if data is None else data)
    try:
        with opened(data, max_pixels) as image:
            return image.height, image.width
    except Exception as error:  # as in `open_image`: Pillow raises nearly every type
        raise ImageError(path, str(error) or type(error).__name__) from None


def shrunk_bytes(height: int, width: int, image_size: int, channels: int = 3) -> int:
    """Return the size of the image that `decode_shrunk` gives of one with these sides, in bytes."""
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


def _as_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Convert opaque RGB, uint8 [H, W, 3]."""
    return pixels if channels == 3 else pixels_of(Image.fromarray(pixels).convert(CHANNEL_MODES[channels]))


def reduced(image: Image.Image, image_size: int) -> np.ndarray:
    """Return the pixels of an 8-bit image, averaged over blocks: uint8 [h, w, C]."""
    numerator = scale_numerator(image.height, image.width, image_size)
    return pixels_of(image if numerator == 8 else image.reduce(8 // numerator))


class JpegHeader(NamedTuple):
    """Contents of a JPEG file's markers.

    Attributes:
        height: In pixels, as stored.
        width: In pixels, as stored.
        orientation: Of EXIF, 1 to 8.
        is_plain: Whether the file is upright and has an end: without one it is truncated, and only decoding all of it
            shows where.
    """

    height: int
    width: int
    orientation: int
    is_plain: bool


def jpeg_header(data: bytes, max_pixels: int = MAX_PIXELS) -> JpegHeader | None:
    """Read the header of a JPEG file of 8 bits, grey or of three colours, and of at most `max_pixels`.

    Returns None for all other files, which Pillow decodes or refuses. The markers are those of ITU-T T.81, annex B.
    """
    if data[:2] != b"\xff\xd8":
        return None
    position, has_metadata = 2, False
    size: tuple[int, int] | None = None
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF or marker in _STANDALONE_MARKERS:  # a fill byte, or a marker without a segment
            position += 1 if marker == 0xFF else 2
            continue
        if marker == _START_OF_SCAN:
            break
        if marker in _OTHER_FRAME_MARKERS:
            return None
        if marker in _FRAME_MARKERS:
            frame = data[position + 4 : position + 10]
            if size is not None or len(frame) < 6 or frame[0] != 8 or frame[5] not in (1, 3):
                return None
            size = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
        has_metadata |= marker == _APP1
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    if size is None or not 0 < size[0] * size[1] <= max_pixels:
        return None
    orientation = _orientation(data, max_pixels) if has_metadata else 1
    return JpegHeader(*size, orientation, is_plain=orientation == 1 and data.endswith(_END_OF_IMAGE))


def _read_odd_jpeg(path: str, data: bytes, height: int, width: int, warning: str, max_pixels: int) -> np.ndarray | None:
    """Decode a file with warnings: raise if Pillow finds it truncated, else add libjpeg's warning as a note."""
    open_image(path, max_pixels, data)
    try:
        pixels = simplejpeg.decode_jpeg(data, min_height=height, min_width=width, strict=False)
    except ValueError:
        return None
    add_notes(path, [f"libjpeg: {warning}"])
    return pixels


def _orientation(data: bytes, max_pixels: int) -> int:
    try:
        with opened(data, max_pixels) as image:
            orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # as in `open_image`, which ends up with upright pixels too
        return 1
    return orientation if orientation in range(1, 9) else 1
