"""Warnings of Pillow and libtiff while they decode an image, collected as notes by the name of the file.

Pillow calls `warnings.warn` and libtiff writes to stderr, both without the name of the file. Notes are kept per thread,
so several threads can read images at once.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from PIL import Image, _imaging

MAX_NOTE = 300  # characters

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)


class _Thread(threading.local):
    """The notes of the file that this thread decodes, and those of finished files by path; None if not collected."""

    current: list[str] | None = None
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
    """Collect warnings in this thread as notes on the image at `path`.

    Yields:
        The notes so far, to which others may be added. If the block raises, they are discarded.
    """
    _listen_to_warnings()
    _listen_to_libtiff()
    notes: list[str] = []
    before, _thread.current = _thread.current, notes
    try:
        yield notes
    finally:
        _thread.current = before
    if notes:
        add_note(path, in_one_line(notes))


def add_note(path: str | os.PathLike[str], note: str) -> None:
    """Add a note on the image at `path`, if this thread collects notes."""
    if _thread.collected is not None:
        _thread.collected[os.fspath(path)] = note


def in_one_line(notes: list[str]) -> str:
    """Return the first of the notes, of which damaged files have hundreds, and the number of others."""
    more = len(set(notes)) - 1
    first = " ".join(notes[0].split())[:MAX_NOTE]
    return f"{first} (and {more} more notes)" if more else first


def _listen_to_warnings() -> None:
    """Replace `warnings.showwarning`; again if a `catch_warnings` block has restored it."""
    if getattr(warnings.showwarning, "notes_images", False):
        return
    show = warnings.showwarning

    def note_warning(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
        if _thread.current is None:
            show(message, category, *place, **options)
        elif not issubclass(category, Image.DecompressionBombWarning):  # `open_image` has its own limit
            _thread.current.append(f"Pillow: {message}")

    note_warning.notes_images = True  # type: ignore[attr-defined]
    warnings.showwarning = note_warning
    warnings.filterwarnings("always", module=r"PIL\.")  # the default is once for each text, whatever the file


@cache
def _listen_to_libtiff() -> list[Any]:
    """Replace the handlers that print to stderr, and return them, so that they are never freed."""
    pillow = ctypes.CDLL(_imaging.__file__)  # finds symbols of the libtiff that Pillow is linked with, too
    handlers = []
    for setter in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
        set_handler = getattr(pillow, setter, None)
        if set_handler is not None:
            set_handler.argtypes, set_handler.restype = [_Handler], ctypes.c_void_p
            handlers.append(_Handler(_note_libtiff(ctypes.CDLL(None).vsnprintf)))
            set_handler(handlers[-1])
    return handlers


def _note_libtiff(vsnprintf: Callable[..., int]) -> Callable[[bytes | None, bytes, int], None]:
    def note(module: bytes | None, text_format: bytes, arguments: int) -> None:
        # A va_list is passed as a pointer on x86-64 and on AArch64.
        text = ctypes.create_string_buffer(MAX_NOTE)
        vsnprintf(text, ctypes.c_size_t(MAX_NOTE), text_format, ctypes.c_void_p(arguments))
        if _thread.current is not None:
            where = "" if module in (None, b"tempfile.tif") else f"{module.decode(errors='replace')}: "
            _thread.current.append(f"libtiff: {where}{text.value.decode(errors='replace')}")

    return note
