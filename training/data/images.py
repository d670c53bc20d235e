"""Opens an image file of unknown origin and returns 8-bit RGB, or says in one line why it cannot.

Pillow's own defaults are not enough for training data: they clip 16-bit values, ignore the EXIF orientation, show the
first frame of an animation, only warn at a decompression bomb, and `verify()` passes truncated files. So every file is
really decoded here.
"""

from __future__ import annotations

import io
import os
import warnings

import numpy as np
from PIL import Image, ImageOps

from training.errors import UserError

MAX_PIXELS = 50_000_000
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

# Only these decoders may look at a file: others, such as EPS, start external programs.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
# A phone's "multi-picture" JPEG holds the photo first, then previews and depth maps: no animation.
_FORMATS_WITH_EXTRA_PICTURES = ("MPO",)


class ImageError(UserError):
    """An image that cannot be used; names the file and the reason.

    Attributes:
        path: The file, or where the image stands in a data set that is no folder of files.
        reason: Why, in one line.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = os.fspath(path)
        self.reason = " ".join(reason.split())
        super().__init__(
            f"cannot use image {self.path!r}: {self.reason}. Repair or remove it, or add --bad-images skip."
        )


def open_image(path: str | os.PathLike[str], max_pixels: int = MAX_PIXELS, data: bytes | None = None) -> Image.Image:
    """Decode the image at `path` completely.

    The EXIF orientation is applied. Grey, palette, CMYK and other 8-bit modes become RGB; 16-bit grey is scaled by
    1/257 (65535 -> 255); floats are taken as 0..1; transparent pixels are laid on white.

    Args:
        path: A file of one of the formats of `IMAGE_EXTENSIONS`, judged by its content, not by its name.
        max_pixels: Most pixels (width x height) that the header may announce; checked before decoding.
        data: The content of the file, where it has been read already.

    Returns:
        A Pillow image of mode "RGB".

    Raises:
        ImageError: Not an image, truncated, animated, more than `max_pixels`, or values of unknown scale.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # oddities in metadata say nothing about the pixels
            with Image.open(path if data is None else io.BytesIO(data), formats=_FORMATS) as image:
                _check_header(image, max_pixels)
                image.load()
                ImageOps.exif_transpose(image, in_place=True)
                return to_rgb(image)
    except Image.UnidentifiedImageError:
        raise ImageError(path, "not an image of a known format") from None
    except Image.DecompressionBombError:
        raise ImageError(path, f"more than {max_pixels / 1e6:g} megapixels (a decompression bomb?)") from None
    # Pillow's decoders raise nearly every exception type on damaged files; each means the same here.
    except Exception as error:
        raise ImageError(path, str(error) or type(error).__name__) from None


def _check_header(image: Image.Image, max_pixels: int) -> None:
    if image.width * image.height > max_pixels:
        raise ValueError(f"{image.width}x{image.height} pixels, more than the {max_pixels / 1e6:g} megapixels allowed")
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format not in _FORMATS_WITH_EXTRA_PICTURES:
        raise ValueError(f"animation with {frames} frames")


def to_rgb(image: Image.Image) -> Image.Image:
    """Make an image 8-bit RGB: 16-bit and float grey scaled, transparency laid on white.

    Raises:
        ValueError: where the scale of its pixels cannot be known.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        image = Image.fromarray(_to_8_bit(np.asarray(image), image.mode))
    if image.has_transparency_data:
        layers = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), layers).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_8_bit(values: np.ndarray, mode: str) -> np.ndarray:
    """Scale grey values [H, W] of more than 8 bits to uint8; raise ValueError where the scale cannot be known."""
    low, high = values.min(), values.max()
    if mode == "F":
        if not (low >= 0 and high <= 1):  # also false for NaN
            raise ValueError(f"float pixels from {low:g} to {high:g}, only 0 to 1 has a known scale")
        return np.rint(values * 255).astype(np.uint8)
    if low < 0 or high > 65535:
        raise ValueError(f"integer pixels from {low} to {high}, only 0 to 65535 has a known scale")
    return np.rint(values / 257).astype(np.uint8)
