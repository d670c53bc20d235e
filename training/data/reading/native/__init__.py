"""Decoding a part of a JPEG, the one thing here that is written in C; all works without it, somewhat slower."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

import numpy as np

from training.data.crops import Box

API_VERSION = 1


def crop_jpeg(data: bytes, eighths: int, box: Box) -> np.ndarray | None:
    """Decode a part of a JPEG of grey or YCbCr pixels.

    Args:
        data: The file.
        eighths: Scale of the image in eighths, 1, 2, 4 or 8.
        box: The part, in pixels of the scaled image.

    Returns:
        uint8 [h, w, 3], the pixels that decoding the whole image gives there; None where there is no compiled code, or
        where it leaves the file to others: a damaged one, or unusual colours.
    """
    library = load_library()
    if library is None:
        return None
    pixels = np.empty((box.height, box.width, 3), dtype=np.uint8)
    verdict = library.crop_jpeg(data, len(data), eighths, *box, pixels.ctypes.data)
    return None if verdict else pixels


@cache
def load_library() -> ctypes.CDLL | None:
    """Return the compiled `crop_jpeg.c`, None where scripts/setup_env.sh could not compile it or made another one."""
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
    """Return where scripts/setup_env.sh puts the compiled code: into the environment, not into the repository."""
    return Path(sys.prefix) / "lib" / "zerovision" / "crop_jpeg.so"
