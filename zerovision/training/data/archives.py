"""Folders of archives (files that contain encoded images), and the index of each archive.

An index contains the position and label of every image. When an archive is first read or has changed, its index is
written next to the archive, or under `--data-root` if the archive's folder is read-only. An index is a NumPy file
without pickled objects, and no text in it is ever opened as a path.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.files import replacing
from zerovision.training.base.units import plural
from zerovision.training.data import DataOptions
from zerovision.training.data.class_names import read_class_names
from zerovision.training.data.division import with_classes
from zerovision.training.data.images import COLUMNS, WORDS, Archive, Images, concatenated, unused_notes
from zerovision.training.data.parts import part_kind
from zerovision.training.data.reading.remote_files import UNKNOWN_CHECKSUM, checksum_of
from zerovision.training.data.reading.retry import entries_of, is_file, is_folder, patiently

SUFFIX = ".index.npz"
CACHE = "indexes"  # under --data-root
CLASS_NAMES = "classnames.txt"  # names of integer labels, one per line, as in CLIP's data sets
LABEL_TYPES = (str, int)
_NUMBERING = re.compile(r"[-_.]?\d+([-_]of[-_]\d+)?([-_][0-9a-f]{8,})?$")  # of "train-00000-of-00002-a1b2c3d4e5f60718"


AnyPath = TypeVar("AnyPath", bound=PurePath)


class Index(NamedTuple):
    """The contents of an archive."""

    images: Images  # in file order
    class_names: Sequence[str] = ()  # of the labels, if the archive contains them
    left_out: int = 0  # number of samples skipped because they have no image or are marked as unlabeled
    columns: Sequence[str] = ()  # see `Kind.columns`
    unused: Sequence[str] = ()  # names of unused columns or JSON keys
    dotted: tuple[int, str] = (0, "")  # images skipped because of several dots in their names, and the first such name
    state: tuple[int, int] = (0, 0)  # size of the archive in bytes, and its modification time in ns
    file: tuple[int, int] = (0, 0)  # inode number of a local archive, and the inode's change time in ns
    checksum: int = UNKNOWN_CHECKSUM  # see `checksum_of`; known if the archive is, or was, read from a URL


class Kind(NamedTuple):
    """A kind of archive."""

    suffix: str  # of the file names
    scan: Callable[[Path], Index]  # may raise a UserError
    open: Callable[[Sequence[Path], Sequence[tuple[int, int]]], Archive]  # takes the files and their `Index.state`
    columns: Sequence[str] = ()  # the requested columns; an index made for other columns is rebuilt


def read(kind: Kind, options: DataOptions) -> Images:
    """Return the images of the archives in a folder and its subfolders, or of one archive; see `listing_of`.

    Raises:
        UserError: If there is no archive, or an archive is unreadable or contains an image without a label.
    """
    root = Path(os.path.expanduser(options.data)).resolve()
    files = _find(root, kind.suffix)
    if not files:
        raise UserError(f"--data {options.data} contains no {kind.suffix} file.")
    root = root if is_folder(root) else root.parent
    indexes = [open_index(kind, file, options.root / CACHE) for file in files]
    archive = kind.open(files, [index.state for index in indexes])
    return listing_of(root, indexes, archive, options, (root / CLASS_NAMES).read_bytes)


def listing_of(
    root: PurePath, indexes: list[Index], archive: Archive, options: DataOptions, read_names: Callable[[], bytes]
) -> Images:
    """Return the images that the indexes of an archive's files list, or raise a UserError.

    An image's part comes from a column or from the file name. `read_names` returns the contents of `CLASS_NAMES`, or
    raises OSError.
    """
    files, notes = archive.files, list(_notes(indexes))
    if not any(len(index.images) for index in indexes):
        more = f" ({notes[-1]})" if notes else ""
        raise UserError(f"--data {options.data}: no image in {plural(len(files), files[0].suffix + ' file')}{more}.")
    parts = [_part_of(file, root) for file in files]
    if not (options.val_part or any(part_kind(part)[0] for part in parts)):
        parts = [""] * len(parts)
    given = _given_names(root, indexes, read_names)
    tables = []
    for index, part in zip(indexes, parts, strict=True):
        images = index.images.renamed("part", {name: name or part for name in index.images.words["part"]})
        images.columns["changed"][:] = index.state[1]
        tables.append(images)
    found = replace(concatenated(tables), root=root, archive=archive, notes=notes)
    return with_classes(found, given, f"--data {options.data}")


def _notes(indexes: Sequence[Index]) -> Iterator[str]:
    if left_out := sum(index.left_out for index in indexes):
        yield f"skipped {plural(left_out, 'sample')} without an image or label"
    yield from unused_notes(name for index in indexes for name in index.unused)
    if dotted := sum(index.dotted[0] for index in indexes):
        first = next(index.dotted[1] for index in indexes if index.dotted[0])
        yield (
            f"skipped {plural(dotted, 'image')} such as {shown(first)}, because a key ends at the first dot of a name: "
            "remove the other dots from the names"
        )


def _find(root: Path, suffix: str) -> list[Path]:
    if not is_folder(root):
        return [root] if is_file(root) else []
    with contextlib.suppress(OSError):
        own = entries_of(root)
        folders = [entry for entry in own if entry.is_dir() and not entry.name.startswith(".")]
        files = [*own, *(entry for folder in folders for entry in entries_of(folder.path))]
        return [Path(entry.path) for entry in files if entry.name.endswith(suffix) and entry.is_file()]
    raise UserError(f"the folder '{root}' cannot be listed.")


def _part_of(file: PurePath, root: PurePath) -> str:
    """Return the name of an archive's part: the file name without its number, or the folder's name."""
    own = _NUMBERING.sub("", file.stem)
    return own if file.parent == root or part_kind(own)[0] else file.parent.name


def _given_names(root: PurePath, indexes: Sequence[Index], read_names: Callable[[], bytes]) -> list[str]:
    """Return the ordered class names from the archives, or from `CLASS_NAMES` next to them; [] if there are none."""
    named = {tuple(index.class_names) for index in indexes} - {()}
    if len(named) > 1:
        raise UserError(f"the files in '{root}' have different class names: make them equal.")
    if named:
        return [*named.pop()]
    with contextlib.suppress(OSError):
        return read_class_names(read_names(), str(root / CLASS_NAMES))
    return []


def open_index(kind: Kind, file: Path, cache: Path) -> Index:
    """Return the index of an archive, writing a new one if it is missing or the archive has changed."""
    state, inode = identity_of(patiently(partial(os.stat, file), file))
    places = index_of(file), kept_index_of(file, cache)
    has_checksum = False
    for place in places:
        index = index_from(place.read_bytes)
        if index and (index.state, index.file, index.columns) == (state, inode, kind.columns):
            return index
        has_checksum |= bool(index and index.checksum)
    checksum = checksum_of(file) if has_checksum else UNKNOWN_CHECKSUM  # needed to read the archive from a URL
    index = kind.scan(file)._replace(state=state, file=inode, columns=kind.columns, checksum=checksum)
    for place in places[file.is_symlink() :]:  # never next to a link, which may point to someone else's file
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_index(index, place)
            break
    return index


def identity_of(status: os.stat_result) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return `Index.state` and `Index.file` of a local archive."""
    return (status.st_size, status.st_mtime_ns), (status.st_ino, status.st_ctime_ns)


def index_of(file: AnyPath) -> AnyPath:
    """Return the path of the index next to an archive."""
    return file.with_name(file.name + SUFFIX)


def kept_index_of(file: PurePath, cache: Path) -> Path:
    """Return the path of an archive's index in `cache`, for archives in read-only folders."""
    return cache / f"{hashlib.sha256(os.fsencode(file)).hexdigest()[:32]}{SUFFIX}"


def index_from(read: Callable[[], bytes]) -> Index | None:
    """Return the index in a file; None if the file is unreadable or not an index."""
    try:
        content = read()
    except OSError:
        return None
    try:
        return _parsed(content)
    except Exception:  # a damaged file may raise any exception
        return None


def write_index(index: Index, place: Path) -> None:
    """Write an index; raise OSError if that fails."""
    images, facts = index.images, index._asdict() | {"words": index.images.words}
    del facts["images"]
    content = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    with replacing(place) as temporary, temporary.open("wb") as stream:
        columns: dict[str, Any] = {f"of_{name}": images[name] for name in COLUMNS}
        np.savez(stream, facts=content, text=images.text.numpy(), **columns)


def _parsed(content: bytes) -> Index:
    """Parse the contents of an index file; invalid contents may raise any exception."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        facts, text = json.loads(file["facts"].tobytes()), file["text"]
        columns = {name: file[f"of_{name}"] for name in COLUMNS}
    words, names = facts.pop("words"), {name: tuple(facts[name]) for name in ("class_names", "columns", "unused")}
    limits = {name: len(words[name]) for name in WORDS} | {"start": len(text) - columns["length"].astype(np.int64) + 1}
    for name, kind in COLUMNS.items():
        column, is_one = columns[name], columns[name].dtype == kind and columns[name].shape == columns["label"].shape
        if not (is_one and ((column >= 0) & (column < limits.get(name, np.inf))).all()):
            raise ValueError(name)
    for name, some in (words | names | {"dotted": facts["dotted"][1:]}).items():
        if not all(type(word) in (LABEL_TYPES if name == "label" else (str,)) for word in some):
            raise ValueError(name)
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    images = Images(PurePath(), tensors, words, torch.from_numpy(text))
    return Index(images, **(facts | names | {name: tuple(facts[name]) for name in ("dotted", "state", "file")}))
