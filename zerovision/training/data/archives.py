"""Folders of archives, files that contain encoded images: which ones there are, and an index of each beside it.

An index says where every image is, and its label. It is made when an archive is first read, or was changed: beside it,
or below `--data-root` if nothing can be written there. It is JSON, and nothing in it is a path that is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar

from zerovision.training.base.atomic_write import replacing
from zerovision.training.base.errors import UserError, shown
from zerovision.training.data import DataOptions
from zerovision.training.data.class_names import Label, number_classes, read_class_names
from zerovision.training.data.columns import unused_notes
from zerovision.training.data.folder_parts import part_kind
from zerovision.training.data.reading.remote_files import UNKNOWN_CHECKSUM, checksum_of
from zerovision.training.data.reading.retry import entries_of, is_file, is_folder, patiently
from zerovision.training.data.reading.sources import Archive
from zerovision.training.data.records import Listing, Record

FORMAT = 3
SUFFIX = ".index.json"
CACHE = "indexes"  # below --data-root
CLASS_NAMES = "classnames.txt"  # the name of each label of a whole number, one a line, as CLIP's data sets have it
LABEL_TYPES = (str, int)
_NUMBERING = re.compile(r"[-_.]?\d+([-_]of[-_]\d+)?([-_][0-9a-f]{8,})?$")  # of "train-00000-of-00002-a1b2c3d4e5f60718"


AnyPath = TypeVar("AnyPath", bound=PurePath)


class Entry(NamedTuple):
    """An image of an archive: a line of its index.

    Attributes:
        path: Its name, see `ImageFile`.
        label: Name or number of its class, see `label_of`.
        place: See `ImageFile`.
        size: In bytes.
        weight: Of its loss.
        group: See `Record`.
        part: As of `Record`, if the archive says it of each image.
    """

    path: str
    label: Label
    place: int
    size: int
    weight: float = 1.0
    group: str = ""
    part: str = ""


class Index(NamedTuple):
    """What an archive contains.

    Attributes:
        entries: The images.
        class_names: Of the labels, if the archive says them.
        left_out: Samples without an image, or without a label where files may have such.
        columns: As of `Kind`.
        unused: Names of the columns, or keys of JSON, that are not used.
        dotted: Number of images whose names have more than one dot, and the first of them.
        state: Size of the archive in bytes, and time of its last change in ns.
        file: Inode of a local archive, and time of the last change of its inode in ns.
        checksum: See `checksum_of`; `UNKNOWN_CHECKSUM` unless the file is, or was, read behind a URL.
    """

    entries: list[Entry]
    class_names: Sequence[str] = ()
    left_out: int = 0
    columns: Sequence[str] = ()
    unused: Sequence[str] = ()
    dotted: tuple[int, str] = (0, "")
    state: tuple[int, int] = (0, 0)
    file: tuple[int, int] = (0, 0)
    checksum: int = UNKNOWN_CHECKSUM


class Kind(NamedTuple):
    """A kind of archive.

    Attributes:
        suffix: Of the files' names.
        scan: Reads an archive's index from its content; raises UserError.
        open: Returns what reads images of files with these states.
        columns: What decides an index besides the file.
    """

    suffix: str
    scan: Callable[[Path], Index]
    open: Callable[[Sequence[Path], Sequence[tuple[int, int]]], Archive]
    columns: Sequence[str] = ()


def read(kind: Kind, options: DataOptions) -> Listing:
    """Return the images of archives, in a folder, in its folders of parts, or of one file; the part is in the name.

    Raises:
        UserError: There is none, or one that cannot be read, or that has an image without a label.
    """
    root = Path(os.path.expanduser(options.data)).resolve()
    files = _find(root, kind.suffix)
    if not files:
        raise UserError(f"--data {options.data}: there is no {kind.suffix} file.")
    root = root if is_folder(root) else root.parent
    indexes = [open_index(kind, file, options.root / CACHE) for file in files]
    archive = kind.open(files, [index.state for index in indexes])
    return listing_of(root, files, indexes, archive, options, (root / CLASS_NAMES).read_bytes)


def listing_of(
    root: PurePath,
    files: Sequence[PurePath],
    indexes: Sequence[Index],
    archive: Archive,
    options: DataOptions,
    read_names: Callable[[], bytes],
) -> Listing:
    """Return what archives contain by their indexes.

    Args:
        root: Folder of the archives.
        files: The archives.
        indexes: Of each; their entries are taken out.
        archive: What reads them.
        options: Of the data.
        read_names: Returns the content of `CLASS_NAMES`, or raises OSError.

    Raises:
        UserError: There is no image, or a label without a name.
    """
    parts = [_part_of(file, root) for file in files]
    if not (options.val_part or any(part_kind(part)[0] for part in parts)):
        parts = [""] * len(parts)
    class_names, numbers = _classes(root, indexes, options, read_names)
    records: list[Record] = []
    for number, (part, index) in enumerate(zip(parts, indexes, strict=True)):
        records += [
            Record(
                entry.path,
                class_names[numbers[entry.label]],
                entry.part or part,
                entry.group,
                size=entry.size,
                changed_ns=index.state[1],
                weight=entry.weight,
                archive=number,
                place=entry.place,
            )
            for entry in index.entries
        ]
        index.entries.clear()  # of millions of images there is room for one list of them
    notes = list(_notes(indexes))
    if not records:
        more = f" ({notes[-1]})" if notes else ""
        raise UserError(f"--data {options.data}: there is no image in {len(files)} {files[0].suffix} file(s){more}.")
    return Listing(root, records, class_names, archive, notes)


def _notes(indexes: Sequence[Index]) -> Iterator[str]:
    if left_out := sum(index.left_out for index in indexes):
        yield f"passed over {left_out} samples without an image or label"
    yield from unused_notes(name for index in indexes for name in index.unused)
    if dotted := sum(index.dotted[0] for index in indexes):
        first = next(index.dotted[1] for index in indexes if index.dotted[0])
        yield (
            f"passed over {dotted} images such as {shown(first)}, because a key ends at the first dot of a name: "
            "take the other dots out of the names"
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
    """Return the name of the part that an archive is of: its own without number, or that of its folder."""
    own = _NUMBERING.sub("", file.stem)
    return own if file.parent == root or part_kind(own)[0] else file.parent.name


def _classes(
    root: PurePath, indexes: Sequence[Index], options: DataOptions, read_names: Callable[[], bytes]
) -> tuple[list[str], dict[Label, int]]:
    """Return the names of the classes, and the number of each label; see `number_classes`."""
    named = {tuple(index.class_names) for index in indexes} - {()}
    if len(named) > 1:
        raise UserError(f"the files in '{root}' have different names of classes: make them alike.")
    given = list(named.pop()) if named else []
    if not given:
        with contextlib.suppress(OSError):
            given = read_class_names(read_names(), str(root / CLASS_NAMES))
    labels = {entry.label for index in indexes for entry in index.entries}
    return number_classes(labels, given, f"--data {options.data}")


def open_index(kind: Kind, file: Path, cache: Path) -> Index:
    """Return the index of an archive; make it if there is none, or the archive has changed."""
    status = patiently(partial(os.stat, file), file)
    state, inode = identity_of(status)
    places = index_of(file), kept_index_of(file, cache)
    has_checksum = False
    for place in places:
        index = index_from(place.read_bytes)
        if index and (index.state, index.file, index.columns) == (state, inode, kind.columns):
            return index
        has_checksum |= bool(index and index.checksum)
    checksum = checksum_of(file) if has_checksum else UNKNOWN_CHECKSUM  # which the file needs to be read behind a URL
    index = kind.scan(file)._replace(state=state, file=inode, columns=kind.columns, checksum=checksum)
    for place in places[file.is_symlink() :]:  # beside what a link leads to it would be another's
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_index(index, place)
            break
    return index


def identity_of(status: os.stat_result) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return `Index.state` and `Index.file` of a local archive."""
    return (status.st_size, status.st_mtime_ns), (status.st_ino, status.st_ctime_ns)


def index_of(file: AnyPath) -> AnyPath:
    """Return the place of an archive's index beside it."""
    return file.with_name(file.name + SUFFIX)


def kept_index_of(file: PurePath, cache: Path) -> Path:
    """Return the place of an archive's index where nothing can be written beside it."""
    return cache / f"{hashlib.sha256(os.fsencode(file)).hexdigest()[:32]}{SUFFIX}"


def index_from(read: Callable[[], bytes]) -> Index | None:
    """Return the index that a file has; None if it cannot be read, or is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, RecursionError, OverflowError):
        return _parsed(json.loads(read()))
    return None


def write_index(index: Index, place: Path) -> None:
    """Write an index; raise OSError if that fails."""
    with replacing(place) as temporary:
        temporary.write_text(
            json.dumps({"format": FORMAT} | index._asdict()), encoding="utf-8", errors="surrogateescape"
        )


def _parsed(content: Any) -> Index:
    """Return an index from its JSON; raise one of several errors if it is none."""
    if content["format"] != FORMAT:
        raise ValueError
    (size, changed_ns), (inode, inode_ns) = content["state"], content["file"]
    labels: dict[Label, Label] = {}

    def entries() -> Iterator[Entry]:
        for path, label, place, length, weight, group, part in content["entries"]:
            if not (type(place) is type(length) is int and 0 <= place < 2**62 and 0 <= length < 2**62):
                raise ValueError
            same = labels.setdefault(label, label)
            entry = Entry(path, same, place, length, weight, group, sys.intern(part))
            is_plain = type(weight) is float and weight == 1 and type(path) is type(group) is str
            yield entry if is_plain and type(label) in LABEL_TYPES else checked(entry)

    texts = [(*content[name],) for name in ("class_names", "columns", "unused")]
    dotted, example = content["dotted"]
    if not all(type(text) is str for text in (*itertools.chain(*texts), example)):
        raise ValueError
    names, columns, unused = texts
    return Index(
        [*entries()],
        names,
        int(content["left_out"]),
        columns,
        unused,
        (int(dotted), example),
        (size, changed_ns),
        (inode, inode_ns),
        int(content["checksum"]),
    )


def checked(entry: Entry) -> Entry:
    """Return an entry with its weight as a float; raise ValueError or TypeError if a value is none that it may have."""
    weight = float(entry.weight)
    is_sound = 0 <= weight < float("inf") and type(entry.label) in LABEL_TYPES
    if not is_sound or not all(type(text) is str for text in (entry.path, entry.group, entry.part)):
        raise ValueError
    return entry._replace(weight=weight if weight != 1 else 1.0)  # one object for most of them
