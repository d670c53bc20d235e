"""Notes on images that are odd but can be used, by the name of the file.

They are kept per thread, so several threads can read images at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

MAX_NOTE = 300  # characters


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


def add_notes(path: str | os.PathLike[str], notes: Sequence[str]) -> None:
    """Add notes on the image at `path`, if there are any and this thread collects them."""
    if notes and _thread.collected is not None:
        _thread.collected[os.fspath(path)] = " ".join("; ".join(dict.fromkeys(notes)).split())[:MAX_NOTE]
