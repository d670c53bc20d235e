"""Engines of CPU ranks as on several machines: they exchange through gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerovision.training.engines import flat_buffers


@contextmanager
def without_shared_memory() -> Iterator[None]:
    """Let engines that are built inside the block exchange through gloo."""
    kept, flat_buffers.SHARED_MEMORY = flat_buffers.SHARED_MEMORY, Path("/nowhere")
    try:
        yield
    finally:
        flat_buffers.SHARED_MEMORY = kept
