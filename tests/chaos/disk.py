"""A small disk of one's own, and how to fill it to the last byte."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FILLER = "chaos-filler"
REFILL_SECONDS = 0.02


@contextlib.contextmanager
def small_disk(path: Path, size: str = "64m") -> Iterator[Path]:
    """Mount a tmpfs of 64 MB, or another size, on an empty folder, and take it away at the end.

    Raises:
        OSError: where mounting is not permitted.
    """
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "zerovision-chaos", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise OSError(f"cannot mount a tmpfs: {result.stderr.strip()}")
    try:
        yield path
    finally:
        # --lazy: a process that is only just ending must not keep it
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@functools.cache
def why_no_disk() -> str:
    """Return why no small disk can be had here; nothing where it can."""
    with tempfile.TemporaryDirectory(prefix="chaos-mount-") as folder:
        try:
            with small_disk(Path(folder)):
                return ""
        except OSError as error:
            return str(error)


def fill(disk: Path, seconds: float) -> None:
    """Keep a disk full for some seconds, whatever is removed from it meanwhile, then free it."""
    deadline = time.monotonic() + seconds
    filler = disk / FILLER
    with filler.open("wb", buffering=0) as file:
        while time.monotonic() < deadline:
            for size in (1 << 20, 1 << 12):
                _write_until_full(file.fileno(), size)
            time.sleep(REFILL_SECONDS)
    filler.unlink()


def _write_until_full(descriptor: int, size: int) -> None:
    with contextlib.suppress(OSError):
        while os.write(descriptor, bytes(size)):
            pass
