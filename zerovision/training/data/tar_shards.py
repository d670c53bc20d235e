"""Tar files in WebDataset's layout: `000123.jpg` next to `000123.cls` or `000123.json`, in `train-000000.tar`, ...

Images are read in place, at the offset in the index: nothing is ever extracted, and no name in a tar file is used as a
path. The key of a sample is the name of its files up to the first dot, and its files are adjacent; see
https://github.com/webdataset/webdataset. A sample has one image and one label.
"""

from __future__ import annotations

import itertools
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from zerovision.training.base.errors import UserError, one_line, shown
from zerovision.training.data import DataOptions, archives
from zerovision.training.data.archives import Index, Kind
from zerovision.training.data.class_names import MOST_DIGITS, Label, clean, label_of
from zerovision.training.data.division import in_parts
from zerovision.training.data.images import Archive, FactColumns, Images, ImagesBuilder, find_column
from zerovision.training.data.reading.files import IMAGE_EXTENSIONS
from zerovision.training.data.reading.retry import patiently

LABEL, FACTS = ".cls", ".json"
LABEL_KEYS = ("label", "cls", "class")  # of the JSON, if there is no .cls
OWN_KEYS = ("path", *LABEL_KEYS)
HIDDEN = "."  # files with this prefix are not samples, such as macOS's ._NAME
MOST_LABEL_BYTES = 2**20
READ_BYTES = 2**24


def listing(options: DataOptions) -> Images:
    """Return the images in tar files; see `archives.read`."""
    return in_parts(archives.read(kind_of(options), options), options)


def kind_of(options: DataOptions) -> Kind:
    """Return the kind of tar files whose images have the extension that `options` names, or any extension."""
    wanted = f".{options.path_column.lower().lstrip('.')}"
    wanted = wanted if os.path.splitext(f"x{wanted}")[1] in IMAGE_EXTENSIONS else ""
    return Kind(".tar", partial(scan, wanted, options.label_column), TarArchive, (wanted, options.label_column))


class TarArchive(Archive):
    """Reads images from tar files by offset in bytes; a state is a file's size in bytes and modification time in ns."""

    def __init__(self, files: Sequence[PurePath], states: Sequence[tuple[int, int]]) -> None:
        self.files, self._states = files, states

    def read(self, file: int, place: int, size: int) -> bytes:
        """See `Archive`."""
        path = self.files[file]
        try:
            return patiently(partial(_read, path, self._states[file], place, size), path)
        except OSError as error:
            raise UserError(
                f"'{path}' cannot be read: {error.strerror or error}. Restore it and start again."
            ) from None


def _read(file: PurePath, state: tuple[int, int], place: int, size: int) -> bytes:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        content = os.pread(descriptor, size, place)
    finally:
        os.close(descriptor)
    if (status.st_size, status.st_mtime_ns) != state or len(content) != size:
        raise UserError(f"'{file}' has changed since the run began: start again.")
    return content


def scan(extension: str, label_key: str, file: Path) -> Index:
    """Return the index of a tar file, or raise a UserError.

    Images have the given extension, which includes the dot, or any if it is ''. In the JSON, the key of the label is
    `label_key` or else one of `LABEL_KEYS`.
    """
    try:
        with tarfile.open(file, "r:", encoding="utf-8") as tar:
            return _Scan(extension, label_key, file, tar).index()
    except tarfile.TarError as error:
        cause = one_line(error)
    except (OSError, ValueError, OverflowError, RecursionError, MemoryError) as error:  # from a crafted header
        cause = f"damaged: {one_line(error)}"
    raise UserError(f"'{file}' is not an uncompressed tar file ({cause}): unpack it, or make it again.")


class _Scan:
    """Reads the samples of a tar file; the arguments are those of `scan`."""

    def __init__(self, extension: str, label_key: str, file: Path, tar: tarfile.TarFile) -> None:
        self._extension, self._label_key, self._file, self._tar = extension, label_key, file, tar
        self._columns: dict[tuple[str, ...], FactColumns] = {}  # by the keys of a JSON

    def index(self) -> Index:
        """Return the index of the file; raise UserError for a sample without exactly one image and one label."""
        builder, keys, left_out = ImagesBuilder(), set[str](), 0
        dotted, example = 0, ""
        for key, group in itertools.groupby(_members(self._file, self._tar), key=lambda member: _key_of(member.name)):
            members = [*group]
            kinds = {_kind_of(member.name): member for member in members}
            if key in keys or len(kinds) < len(members):
                raise UserError(
                    f"'{self._file}': the key {shown(key)} occurs more than once: all files of a sample must have one "
                    "key and follow each other: rename one, or pack the file again with tar --sort=name."
                )
            keys.add(key)
            images = [kind for kind in kinds if self._is_image(kind)]
            others = [kind for kind in kinds if kind not in images and os.path.splitext(kind)[1] in IMAGE_EXTENSIONS]
            if not self._extension and others:
                dotted, example = dotted + len(others), example or kinds[others[0]].name
            if len(images) > 1:
                raise UserError(
                    f"'{self._file}': the sample {shown(key)} has several images, {' and '.join(images)}: choose one "
                    f"with --path-column {images[0][1:]}."
                )
            left_out += not (images and self._add(builder, key, kinds[images[0]], kinds))
        unused = [name for columns in self._columns.values() for name in columns.unused]
        found = builder.build(self._file.parent)
        return Index(found, left_out=left_out, unused=tuple(dict.fromkeys(unused)), dotted=(dotted, example))

    def _is_image(self, kind: str) -> bool:
        return kind == self._extension if self._extension else kind in IMAGE_EXTENSIONS

    def _add(
        self, builder: ImagesBuilder, key: str, image: tarfile.TarInfo, kinds: Mapping[str, tarfile.TarInfo]
    ) -> bool:
        """Add the image of a sample; return False if the sample is marked as unlabeled."""
        texts = {kind: _text(self._file, self._tar, kinds[kind]) for kind in (LABEL, FACTS) if kind in kinds}
        try:
            facts = json.loads(texts.get(FACTS, "{}"))
            facts = facts if isinstance(facts, dict) else {}
            label = self._label(facts, texts.get(LABEL))
            if label is None:
                return False
            names = tuple(facts)
            if names not in self._columns:
                self._columns[names] = FactColumns(names, [name for name in names if self._is_own(name)])
            known, path = self._columns[names].facts(facts), facts.get("path", image.name)
            builder.add(clean(path), label, known, state=(image.size, 0), place=image.offset_data)
            return True
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            reason = f": {error}" if type(error) is ValueError and error.args else " has no label"
            raise UserError(
                f"'{self._file}': the sample {shown(key)}{reason}: expected {LABEL} with the name or number of a "
                f'class, or {FACTS} with {{"label": ...}}, next to the image (as tar --sort=name packs them).'
            ) from None

    def _is_own(self, name: str) -> bool:
        return clean(name).casefold() in {*OWN_KEYS, self._label_key.casefold()}

    def _label(self, facts: Mapping[str, Any], text: str | None) -> Label | None:
        """Return the label of a sample; raise LookupError if it is missing, ValueError if it is invalid."""
        if text is None:
            found = [find_column([*facts], name) for name in (self._label_key, *LABEL_KEYS)]
            return label_of(facts[next(filter(None, found), LABEL)])
        label = str(label_of(text))
        is_number = label.isascii() and label.isdigit() and str(int(label[:MOST_DIGITS])) == label
        return int(label) if is_number else label  # as WebDataset writes numbers; 007 is a name


def _members(file: Path, tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files in a tar file, checking that each is complete and follows the previous one."""
    total, last = os.path.getsize(file), -1
    for member in tar:
        if member.offset <= last or member.size < 0 or member.offset_data + member.size > total:
            raise tarfile.ReadError(f"the member at {member.offset} is cut off, or its header is damaged")
        last = member.offset
        if member.isreg() and member.sparse is None and not os.path.basename(member.name).startswith(HIDDEN):
            yield member
        tar.members = []  # type: ignore[attr-defined]  # otherwise all headers stay in memory
    tar.fileobj.seek(tar.offset)  # where tarfile stopped: it treats a header that it cannot read as the end
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"cut off, or damaged at {tar.offset}")
    while rest := tar.fileobj.read(READ_BYTES):
        if rest.strip(b"\0"):
            raise UserError(
                f"'{file}' continues after its end, as if joined with cat: join files with tar --concatenate, or keep "
                "them apart in one folder."
            )


def _key_of(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _kind_of(name: str) -> str:
    return "." + name.rpartition("/")[2].partition(".")[2].lower()


def _text(file: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    if member.size > MOST_LABEL_BYTES:
        raise UserError(f"'{file}': {shown(member.name)} has {member.size} bytes, which is not a label.")
    content = tar.extractfile(member)
    return "" if content is None else content.read().decode("utf-8", "surrogateescape")


TAR = kind_of(DataOptions())
