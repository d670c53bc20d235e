"""Decodes a part of a JPEG in C; without the compiled code, whole images are decoded, which is slower."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np

from zerovision.training.base.errors import UserError, one_line
from zerovision.training.data.augment import Box

API_VERSION = 1


def crop_jpeg(data: bytes, scale_numerator: int, box: Box) -> np.ndarray | None:
    """Decode a part of a gray or YCbCr JPEG that is scaled to `scale_numerator` (1, 2, 4 or 8) eighths.

    `box` is in pixels of the scaled image. Return uint8 [h, w, 3], the same pixels as when the whole image is decoded,
    or None if there is no compiled code, or if the file is damaged or has unusual colors.
    """
    library = load_library()
    if library is None:
        return None
    pixels = np.empty((box.height, box.width, 3), dtype=np.uint8)
    is_refused = library.crop_jpeg(data, len(data), scale_numerator, *box, pixels.ctypes.data)
    return None if is_refused else pixels


@cache
def load_library() -> ctypes.CDLL | None:
    """Load the compiled `crop_jpeg.c`; return None if it was not compiled or its version differs."""
    try:
        library = ctypes.CDLL(str(library_path()))
        if library.crop_jpeg_version() != API_VERSION:
            return None
        library.crop_jpeg.argtypes = [ctypes.c_char_p, ctypes.c_size_t, *[ctypes.c_int] * 5, ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return library


def library_path() -> Path:
    """Return the path of the compiled code in the Python environment."""
    return Path(sys.prefix) / "lib" / "zerovision" / "crop_jpeg.so"


def compile_library() -> Path:
    """Compile `crop_jpeg.c` into the Python environment with cc and libjpeg-turbo's headers; return the path.

    Raises:
        UserError: If compilation fails; the message contains the compiler's output.
    """
    library, source = library_path(), Path(__file__).with_name("crop_jpeg.c")
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ljpeg"]
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = one_line(getattr(error, "stderr", "") or error)
        raise UserError(f"not compiled: {said.rstrip('.')}. It needs cc and libjpeg's headers (libjpeg-dev).") from None
    return library
