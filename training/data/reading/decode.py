"""From the file of an image to its pixels: at full size, or shrunk while decoding.

Shrinking is a function of the file and the image size S alone, whatever crop follows: by 1, 1/2, 1/4 or 1/8, the
smallest whose shorter side is still 2 S pixels or more. So a cache of shrunk images holds exactly the pixels that are
decoded without one.

JPEG files are shrunk by libjpeg-turbo's scaled inverse DCT, which saves most of the work; all else is decoded by Pillow
and averaged over blocks. Pillow also has the last word on every file that libjpeg-turbo finds anything odd in.
"""

from __future__ import annotations

import io
from typing import NamedTuple, Protocol

import numpy as np
import simplejpeg
from PIL import Image

from training.data.crops import BoxChooser
from training.data.reading.image_notes import add_note, noting
from training.data.reading.images import MAX_PIXELS, ImageError, open_image, read_file
from training.data.reading.native import crop_jpeg

EIGHTHS = (1, 2, 4)  # scales below 1; the others that libjpeg-turbo has are slower than what they save
_STANDALONE_MARKERS = (0x01, *range(0xD0, 0xD8))  # without a length
_FRAME_MARKERS = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive Huffman coding
_OTHER_FRAME_MARKERS = (0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_START_OF_SCAN, _APP1 = 0xDA, 0xE1
END_OF_IMAGE = b"\xff\xd9"


class Decoder(Protocol):
    """Reads image files; the same file gives the same pixels always."""

    def read(self, path: str) -> np.ndarray:
        """Return the image as uint8 [H, W, 3]; raise ImageError where it cannot be used."""

    def read_part(self, path: str, choose: BoxChooser) -> np.ndarray:
        """Return what `choose` takes of the image that `read` gives: uint8 [h, w, 3]."""


class FullDecoder:
    """Decodes every pixel, by Pillow."""

    def read(self, path: str) -> np.ndarray:
        """Return the image as uint8 [H, W, 3]; raise ImageError where it cannot be used."""
        return np.array(open_image(path))

    def read_part(self, path: str, choose: BoxChooser) -> np.ndarray:
        """Return a part of the image, uint8 [h, w, 3]."""
        return cut(self.read(path), choose)


class ShrinkingDecoder:
    """Decodes no more than the image size asks for.

    Args:
        image_size: Side S of what the model sees, in pixels.
    """

    def __init__(self, image_size: int) -> None:
        self._image_size = image_size

    def read(self, path: str) -> np.ndarray:
        """Return the shrunk image as uint8 [H, W, 3]; raise ImageError where it cannot be used."""
        data = read_file(path)
        header = jpeg_header(data, path)
        if header is None:
            return self._reduced(path, data)
        return self._read_jpeg(path, data, header)

    def read_part(self, path: str, choose: BoxChooser) -> np.ndarray:
        """Return a part of the shrunk image, uint8 [h, w, 3]; the rest of a JPEG is not decoded where that is safe."""
        data = read_file(path)
        header = jpeg_header(data, path)
        if header is None:
            return cut(self._reduced(path, data), choose)
        eighths = scale_denominator(header.height, header.width, self._image_size)
        # a file without its end is truncated: where, only the whole decode tells
        if header.orientation == 1 and data.endswith(END_OF_IMAGE):
            box = choose(*scaled_size(header, eighths))
            part = crop_jpeg(data, eighths, box)
            if part is not None:
                return part
        return cut(self._read_jpeg(path, data, header), choose)

    def shrunk_size(self, path: str) -> tuple[int, int]:
        """Return height and width of the shrunk image from the file's header; raise ImageError where there is none."""
        data = read_file(path)
        header = jpeg_header(data, path)
        if header is None:
            try:
                with noting(path), Image.open(io.BytesIO(data)) as image:
                    header = JpegHeader(image.height, image.width, 1)
            except Exception as error:  # as in `open_image`: Pillow raises nearly every type
                raise ImageError(path, str(error) or type(error).__name__) from None
        height, width = scaled_size(header, scale_denominator(header.height, header.width, self._image_size))
        return (width, height) if header.orientation > 4 else (height, width)

    def _read_jpeg(self, path: str, data: bytes, header: JpegHeader) -> np.ndarray:
        eighths = scale_denominator(header.height, header.width, self._image_size)
        height, width = scaled_size(header, eighths)
        try:
            pixels = simplejpeg.decode_jpeg(data, min_height=height, min_width=width)
        except ValueError as warning:
            pixels = _read_odd_jpeg(path, data, height, width, str(warning))
        if pixels is None or pixels.shape[:2] != (height, width):
            return self._reduced(path, data)
        return pixels if header.orientation == 1 else _upright(pixels, header.orientation)

    def _reduced(self, path: str, data: bytes) -> np.ndarray:
        image = open_image(path, data=data)
        eighths = scale_denominator(image.height, image.width, self._image_size)
        return np.array(image if eighths == 8 else image.reduce(8 // eighths))


class JpegHeader(NamedTuple):
    """What the markers of a JPEG file say; height and width in pixels, as stored, and the EXIF orientation, 1 to 8."""

    height: int
    width: int
    orientation: int


def jpeg_header(data: bytes, path: str = "", max_pixels: int = MAX_PIXELS) -> JpegHeader | None:
    """Read the header of a JPEG file of 8 bits, grey or of three colours, and of at most `max_pixels`.

    Returns None for all else, which is Pillow's to judge. The markers are those of ITU-T T.81, annex B.
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
    return JpegHeader(*size, orientation=_orientation(data, path) if has_metadata else 1)


def scale_denominator(height: int, width: int, image_size: int) -> int:
    """Return the scale of an image in eighths: 1, 2, 4 or 8."""
    shorter = min(height, width)
    return next((eighths for eighths in EIGHTHS if -(-shorter * eighths // 8) >= 2 * image_size), 8)


def scaled_size(header: JpegHeader, eighths: int) -> tuple[int, int]:
    """Return height and width in pixels at a scale: rounded up, as libjpeg does."""
    return -(-header.height * eighths // 8), -(-header.width * eighths // 8)


def cut(pixels: np.ndarray, choose: BoxChooser) -> np.ndarray:
    """Return the part of uint8 [H, W, 3] that `choose` takes, as a view."""
    box = choose(*pixels.shape[:2])
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def _read_odd_jpeg(path: str, data: bytes, height: int, width: int, warning: str) -> np.ndarray | None:
    """Decode a file with warnings: an error if Pillow finds it truncated, else with libjpeg's warning as a note."""
    open_image(path, data=data)
    try:
        pixels = simplejpeg.decode_jpeg(data, min_height=height, min_width=width, strict=False)
    except ValueError:
        return None
    add_note(path, f"libjpeg: {warning}")
    return pixels


def _orientation(data: bytes, path: str) -> int:
    try:
        with noting(path), Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
            orientation = image.getexif().get(0x0112, 1)
    except Exception:  # as in `open_image`, which ends up with upright pixels too
        return 1
    return orientation if orientation in _UPRIGHT else 1


# how Pillow's `exif_transpose` makes each orientation upright
_UPRIGHT = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels),
}


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    return np.ascontiguousarray(_UPRIGHT[orientation](pixels))
