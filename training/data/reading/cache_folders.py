"""Where caches of images lie, how large they may grow, and which of them have to go."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from training.data import DataOptions, dataset_root
from training.data.reading.cache import INDEX, PIXELS, ImageCache, locked

RAM_SHARE = 0.25  # of this machine's memory, for all caches in it together
DISK_BYTES = 50 * 10**9
_MEMORY_LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class CacheLocation:
    """A folder of caches.

    Attributes:
        name: "ram" or "disk".
        root: The folder; each cache is a folder in it, named by its key.
        max_bytes: Most bytes of all caches in it together.
    """

    name: str
    root: Path
    max_bytes: int


def open_cache(options: DataOptions, key: str, expected_bytes: int) -> tuple[ImageCache | None, str]:
    """Open the cache of a data set, or make it.

    Args:
        options: `cache` says where; "auto" takes memory where the whole set fits, else the disk where it fits.
        key: What decides the pixels, as a file name.
        expected_bytes: What the whole set will take, roughly.

    Returns:
        The cache, None for going without, and one line for the user, "" where there is nothing to say.
    """
    if options.cache == "off":
        return None, ""
    places = _locations(options)
    if options.cache == "auto":
        places = [place for place in places if (place.root / key).is_dir()] or places
        candidates = [place for place in places if expected_bytes <= _room(place, key)]
    else:
        candidates = [place for place in places if place.name == options.cache]
    refused = []
    for place in candidates:
        try:
            cache = _open_in(place, key, expected_bytes)
        except OSError as error:
            refused.append(f"{place.root}: {error.strerror}")
            continue
        note = f"cache of decoded images: {place.name}, about {expected_bytes / 1e9:.2f} GB in {cache.folder}"
        return cache, "; ".join([note, *refused])
    too_large = f"{expected_bytes / 1e9:.1f} GB fit neither memory nor disk within their bounds (--cache-gb)"
    return None, f"no cache of decoded images: {'; '.join(refused) or too_large}"


def _locations(options: DataOptions) -> list[CacheLocation]:
    given = int(options.cache_gb * 1e9)
    # others may write to /dev/shm too: a folder of our own keeps their files apart from ours
    ram = CacheLocation("ram", Path(f"/dev/shm/zerovision-{os.getuid()}"), given or int(RAM_SHARE * _memory_bytes()))
    return [ram, CacheLocation("disk", dataset_root(options) / "images", given or DISK_BYTES)]


def _memory_bytes() -> int:
    total = psutil.virtual_memory().total
    try:
        return min(total, int(_MEMORY_LIMIT_OF_CONTAINER.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return total


def _room(place: CacheLocation, key: str) -> int:
    """Return the bytes that a cache may take: within the bound, and free or held by caches that may have to go."""
    existing = next((folder for folder in (place.root, *place.root.parents) if folder.is_dir()), Path("/"))
    free = shutil.disk_usage(existing).free
    return min(place.max_bytes, free + sum(_size(folder) for folder in _caches(place.root)))


def _open_in(place: CacheLocation, key: str, expected_bytes: int) -> ImageCache:
    """Open a cache in `place`; remove others, the longest unused first, where they leave too little room."""
    place.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Also a link in its place. Once the folder is ours nobody else can put another there: /dev/shm is sticky.
    if {place.root.lstat().st_uid, place.root.stat().st_uid} != {os.getuid()}:
        raise PermissionError(errno.EPERM, "belongs to another user")
    lock = os.open(place.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with locked(lock):  # the ranks of a machine come here at the same time
            others = [folder for folder in _caches(place.root) if folder.name != key]
            others.sort(key=_last_use)
            taken, own = sum(map(_size, others)), _size(place.root / key)
            for folder in others:
                free = own + shutil.disk_usage(place.root).free
                if expected_bytes <= min(place.max_bytes - taken, free):
                    break
                size = _size(folder)
                taken -= size if _remove(folder) else 0
            (place.root / key).mkdir(mode=0o700, exist_ok=True)
            cache = ImageCache(place.root / key, max_bytes=max(0, place.max_bytes - taken))
            os.utime(place.root / key / INDEX)
            return cache
    finally:
        os.close(lock)


def _caches(root: Path) -> Iterator[Path]:
    return (path.parent for path in root.glob(f"*/{INDEX}"))


def _last_use(folder: Path) -> float:
    return (folder / INDEX).stat().st_mtime


def _size(folder: Path) -> int:
    try:
        return sum((folder / name).stat().st_size for name in (INDEX, PIXELS))
    except FileNotFoundError:  # not there yet, or removed by now
        return 0


def _remove(folder: Path) -> bool:
    """Remove a cache unless a process has it open; say whether it is gone."""
    index = os.open(folder / INDEX, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except OSError:
        return False
    finally:
        os.close(index)
    return True
