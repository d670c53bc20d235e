"""Tar files in WebDataset's layout: `000123.jpg` beside `000123.cls` or `000123.json`, in `train-000000.tar`, ...

Images are read where they are, by the offset that the index has: nothing is ever extracted, and no name in a tar file
is opened. The key of a sample is its name up to the first dot: https://github.com/webdataset/webdataset.
"""

from __future__ import annotations

import itertools
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from training.base.errors import UserError, one_line, shown
from training.data import DataOptions, archives
from training.data.archives import Entry, Index, Kind, checked
from training.data.reading.formats import IMAGE_EXTENSIONS
from training.data.reading.retry import patiently
from training.data.records import Listing

LABEL, FACTS = ".cls", ".json"
LABEL_KEYS = ("label", "cls", "class")  # of the JSON, if there is no .cls
MOST_LABEL_BYTES = 2**20


def listing(options: DataOptions) -> Listing:
    """Return the images of tar files; see `archives.read`."""
    return archives.read(TAR, options)


@dataclass(frozen=True)
class TarArchive:
    """Reads images of tar files by their offset in bytes.

    Attributes:
        files: The tar files.
        states: Of each, its size in bytes and the time of its last change in ns.
    """

    files: Sequence[Path]
    states: Sequence[tuple[int, int]]

    def read(self, archive: int, place: int, size: int) -> bytes:
        """See `Archive`."""
        file = self.files[archive]
        try:
            return patiently(partial(self._read, archive, place, size), file)
        except OSError as error:
            raise UserError(
                f"'{file}' cannot be read: {error.strerror or error}. Restore it and start again."
            ) from None

    def _read(self, archive: int, place: int, size: int) -> bytes:
        file = self.files[archive]
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            content = os.pread(descriptor, size, place)
        finally:
            os.close(descriptor)
        if (status.st_size, status.st_mtime_ns) != self.states[archive] or len(content) != size:
            raise UserError(f"'{file}' has changed since the run began: start again.")
        return content


def scan(file: Path) -> Index:
    """Return what a tar file contains.

    Raises:
        UserError: It is no tar file, compressed, cut off, or an image has no label.
    """
    try:
        with tarfile.open(file, "r:", encoding="utf-8") as tar:
            return _index(file, tar)
    except tarfile.TarError as error:
        cause = one_line(error)
    except (OSError, ValueError, OverflowError, RecursionError, MemoryError) as error:  # of a crafted header
        cause = f"damaged: {one_line(error)}"
    raise UserError(f"'{file}' is no uncompressed tar file ({cause}): unpack it, or make it anew.")


def _index(file: Path, tar: tarfile.TarFile) -> Index:
    entries, left_out = [], 0
    for _, group in itertools.groupby(_members(file, tar), key=lambda member: _key_of(member.name)):
        by_kind = {_kind_of(member.name): member for member in reversed([*group])}
        image = next((member for kind, member in by_kind.items() if kind in IMAGE_EXTENSIONS), None)
        if image is None:
            left_out += 1
            continue
        texts = {kind: _text(file, tar, by_kind[kind]) for kind in (LABEL, FACTS) if kind in by_kind}
        try:
            entries.append(_entry(image, texts))
        except (ValueError, TypeError, LookupError, RecursionError):
            raise UserError(
                f"'{file}': the sample {shown(_key_of(image.name))} has no label: expected {LABEL} with the name or "
                f'number of a class, or {FACTS} with {{"label": ...}}.'
            ) from None
    return Index(entries, left_out=left_out)


def _members(file: Path, tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files in a tar file, each of which ends in it, one behind the other."""
    total, last = os.path.getsize(file), -1
    for member in tar:
        if member.offset <= last or member.size < 0 or member.offset_data + member.size > total:
            raise tarfile.ReadError(f"the member at {member.offset} is cut off, or its header is damaged")
        last = member.offset
        if member.isreg() and member.sparse is None:
            yield member
        tar.members = []  # type: ignore[attr-defined]  # which would keep all headers in memory
    tar.fileobj.seek(tar.offset)  # where tarfile found the end: it takes any header for one that it cannot read
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"cut off, or damaged at {tar.offset}")


def _entry(image: tarfile.TarInfo, texts: dict[str, str]) -> Entry:
    facts: Any = json.loads(texts.get(FACTS, "{}"))
    facts = facts if isinstance(facts, dict) else {}
    label = texts[LABEL].strip() if LABEL in texts else facts[min(facts.keys() & LABEL_KEYS, key=LABEL_KEYS.index)]
    if type(label) not in (str, int) or label == "":
        raise ValueError
    path, box = facts.get("path", image.name), facts.get("box") or ()
    entry = Entry(
        path, str(label), image.offset_data, image.size, box, facts.get("weight", 1.0), facts.get("group", "")
    )
    return checked(entry)


def _key_of(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _kind_of(name: str) -> str:
    return "." + name.rpartition("/")[2].partition(".")[2].lower()


def _text(file: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    if member.size > MOST_LABEL_BYTES:
        raise UserError(f"'{file}': {shown(member.name)} has {member.size} bytes, which is no label.")
    content = tar.extractfile(member)
    return "" if content is None else content.read().decode("utf-8", "surrogateescape")


TAR = Kind(".tar", scan, TarArchive)
