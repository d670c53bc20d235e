"""Notes on images that are odd but can be used, by the name of the file.

They are kept per thread, so several threads can read images at once.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from PIL import Image, _imaging

MAX_NOTE = 300  # characters
_NO_BOMB = ("ignore", None, Image.DecompressionBombWarning, None, 0)  # `open_image` has its own limit


class _Thread(threading.local):
    """The notes of this thread's files by path; None if not collected."""

    collected: dict[str, str] | None = None


_thread = _Thread()


@contextmanager
def collected_notes() -> Iterator[dict[str, str]]:
    """Collect the notes of all images that this thread decodes in the block: path to notes, in one line."""
    before, _thread.collected = _thread.collected, {}
    try:
        yield _thread.collected
    finally:
        _thread.collected = before


@contextmanager
def noting(path: str | os.PathLike[str]) -> Iterator[list[str]]:
    """Collect notes on the image at `path`, which is decoded in the block; libtiff prints nothing.

    Yields:
        The notes, to which others may be added. If the block raises, they are discarded.
    """
    if _NO_BOMB not in warnings.filters:
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    _silence_libtiff()
    notes: list[str] = []
    yield notes
    if notes:
        add_note(path, _in_one_line(notes))


def add_note(path: str | os.PathLike[str], note: str) -> None:
    """Add a note on the image at `path`, if this thread collects notes."""
    if _thread.collected is not None:
        _thread.collected[os.fspath(path)] = note


def _in_one_line(notes: list[str]) -> str:
    return " ".join("; ".join(dict.fromkeys(notes)).split())[:MAX_NOTE]


@cache
def _silence_libtiff() -> None:
    """Stop libtiff from printing to stderr, dozens of lines of a damaged file: what cannot be read is one error."""
    pillow = ctypes.CDLL(_imaging.__file__)  # finds symbols of the libtiff that Pillow is linked with, too
    for setter in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
        if set_handler := getattr(pillow, setter, None):
            set_handler(None)
