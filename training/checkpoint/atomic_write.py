"""Making sure that a file is whole, and on the disk, before anything relies on it; removing what a kill left of one."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# name, owner, kind: .model.safetensors.node01+4026531836+4711+99887766.tmp
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.(?P<owner>(?P<place>[^+]+\+\d+)\+(?P<pid>\d+)\+\d+)\.(?P<kind>new|old|tmp)")
SECONDS_OF_OTHERS = 86400.0  # another machine's files count as left behind after so long without a change


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write to; the file takes the place of `path` where the block ends without error.

    A failure leaves the old file, and nothing beside it.
    """
    temporary = unfinished(path, "tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder` to fill; it takes the place of `folder` if the block ends without error."""
    remove_leftovers(folder.parent)
    new, old = (unfinished(folder, kind) for kind in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
    finally:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that people read too."""
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def unfinished(path: Path, kind: str) -> Path:
    """Return the name beside `path` under which this process prepares it; `kind` is 'new', 'old' or 'tmp'."""
    return path.with_name(f".{path.name[:100]}.{_place()}+{os.getpid()}+{_start_of('self')}.{kind}")


def remove_leftovers(folder: Path, ours: Collection[str] = ()) -> None:
    """Remove from a folder what processes that no longer live have left unfinished.

    Whether they live can be seen only from their own machine and container. A folder that was taken away to be
    replaced, and was not, comes back.

    Args:
        folder: the folder.
        ours: names of files that nobody but this process writes at this time.
    """
    with contextlib.suppress(OSError):  # of what cannot be seen or removed, nothing depends on
        for path in list(folder.iterdir()):
            found = _UNFINISHED.fullmatch(path.name)
            if not found or (found["name"] not in ours and _may_live(path, found)):
                continue
            if found["kind"] == "old" and not (folder / found["name"]).exists():
                path.rename(folder / found["name"])
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _may_live(path: Path, found: re.Match[str]) -> bool:
    if found["place"] == _place():
        return found["owner"] == f"{_place()}+{found['pid']}+{_start_of(found['pid'])}"
    return time.time() - path.lstat().st_mtime < SECONDS_OF_OTHERS


@functools.cache
def _place() -> str:
    """Return the machine, and the container on it, in which our process numbers mean what they say."""
    host = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname())[:60] or "host"
    return f"{host}+{os.stat('/proc/self/ns/pid').st_ino}"


def _start_of(pid: str) -> str:
    """Return when a process started, in clock ticks since the machine did; '' if there is none of that number."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
