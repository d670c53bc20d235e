"""Digests of the image files that this thread reads: equal ones mean the same file, byte for byte."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

UNKNOWN = 0  # of an image whose file was not read


class _Thread(threading.local):
    """Digests by path; None if they are not collected."""

    collected: dict[str, int] | None = None


_thread = _Thread()


@contextmanager
def collected_digests(digests: dict[str, int] | None = None) -> Iterator[dict[str, int]]:
    """Collect the digest, 63 bits of sha256, of each file that this thread reads in the block, by path.

    Args:
        digests: Gets them; a new dictionary if it is None.
    """
    before, _thread.collected = _thread.collected, {} if digests is None else digests
    try:
        yield _thread.collected
    finally:
        _thread.collected = before


def note_content(path: str | os.PathLike[str], content: bytes) -> None:
    """Note the content of a file, if this thread collects digests."""
    if _thread.collected is not None:
        _thread.collected[os.fspath(path)] = int.from_bytes(sha256(content).digest()[:8], "little") >> 1 or 1


def note_digest(path: str, digest: int) -> None:
    """Note a digest that was kept with the pixels of a file."""
    if _thread.collected is not None and digest != UNKNOWN:
        _thread.collected[path] = digest
