"""Decoding a part of a JPEG in C; without the compiled code whole images are decoded, somewhat slower."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

import numpy as np

from zerovision.training.data.augment import Box

API_VERSION = 1


def crop_jpeg(data: bytes, scale_numerator: int, box: Box) -> np.ndarray | None:
    """Decode a part of a JPEG of grey or YCbCr pixels.

    Args:
        data: The file.
        scale_numerator: Scale of the image in eighths, 1, 2, 4 or 8.
        box: The part, in pixels of the scaled image.

    Returns:
        uint8 [h, w, 3], the same pixels as of the whole image decoded; None if there is no compiled code, or if it
        refuses the file: a damaged one, or unusual colours.
    """
    library = load_library()
    if library is None:
        return None
    pixels = np.empty((box.height, box.width, 3), dtype=np.uint8)
    is_refused = library.crop_jpeg(data, len(data), scale_numerator, *box, pixels.ctypes.data)
    return None if is_refused else pixels


@cache
def load_library() -> ctypes.CDLL | None:
    """Return the compiled `crop_jpeg.c`, None if scripts/setup_env.sh could not compile it or its version differs."""
    try:
        library = ctypes.CDLL(str(library_path()))
        if library.crop_jpeg_version() != API_VERSION:
            return None
        numbers = [ctypes.c_int] * 5
        library.crop_jpeg.argtypes = [ctypes.c_char_p, ctypes.c_size_t, *numbers, ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return library


def library_path() -> Path:
    """Return the path of the compiled code, which scripts/setup_env.sh writes into the environment."""
    return Path(sys.prefix) / "lib" / "zerovision" / "crop_jpeg.so"
