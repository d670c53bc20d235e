"""Parquet files with images, in the layout of Hugging Face's data sets, or with tables of paths; see `table`.

The image column is a struct of bytes and path. The label column contains names, or numbers whose names are in the
schema's metadata; see https://huggingface.co/docs/datasets/image_dataset. Only this module needs pyarrow.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from zerovision.training.base.errors import FileServerError, UserError, one_line
from zerovision.training.data import DataOptions, archives
from zerovision.training.data.archives import Index, Kind
from zerovision.training.data.class_names import clean, label_of
from zerovision.training.data.division import in_parts
from zerovision.training.data.images import ROW_BITS, Archive, FactColumns, Images, ImagesBuilder, find_column
from zerovision.training.data.parts import PARTS, TRAIN
from zerovision.training.data.reading.remote import redacted
from zerovision.training.data.reading.retry import is_file, patiently
from zerovision.training.data.table import listing_of

SUFFIX = ".parquet"
IMAGE_COLUMN = "image"
METADATA = b"huggingface"
CACHE_BYTES = 256 * 2**20  # limit for the row groups that a process keeps in memory
MOST_GROUP_BYTES = 2 * 10**9  # of a row group, which is read as a whole


def listing(options: DataOptions) -> Images:
    """Return the images in Parquet files; see `archives.read` or, for files without images, `table.listing`.

    For `hf:ORG/NAME[:SPLIT]`, the files come from the Hugging Face Hub's cache; see `$HF_HOME`.
    """
    if options.data.startswith("hf:"):
        return _of_hub(options)
    path = Path(os.path.expanduser(options.data))
    if is_file(path) and not _image_columns((file := _opened(path)).schema_arrow, options.label_column):
        rows = enumerate((row for batch in file.iter_batches() for row in batch.to_pylist()), 1)
        return listing_of(file.schema_arrow.names, rows, options)
    return in_parts(archives.read(kind_of(options), options), options)


def kind_of(options: DataOptions) -> Kind:
    """Return the kind of Parquet files with the columns that `options` names."""
    columns = options.path_column or IMAGE_COLUMN, options.label_column
    return Kind(SUFFIX, partial(scan, columns), partial(ParquetArchive, columns), columns)


def _opened(path: PurePath) -> Any:
    """Open a file as pyarrow's `ParquetFile`, or raise a UserError."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"'{path}': Parquet files need pyarrow: pip install pyarrow.") from None
    try:
        return patiently(lambda: parquet.ParquetFile(path), path)
    except (FileServerError, UserError):
        raise
    except Exception as error:  # a damaged file may raise any exception
        raise UserError(f"'{path}' is not a readable Parquet file ({one_line(error)}).") from None


def _image_columns(schema: Any, label_column: str) -> list[str]:
    """Return the columns of encoded images: structs with bytes, or bytes that are not labels."""
    from pyarrow import types

    def is_bytes(kind: Any) -> bool:
        return types.is_binary(kind) or types.is_large_binary(kind)

    def has_bytes(kind: Any) -> bool:
        return types.is_struct(kind) and any(field.name == "bytes" and is_bytes(field.type) for field in kind)

    label = find_column(schema.names, label_column)
    return [f.name for f in schema if has_bytes(f.type) or (is_bytes(f.type) and f.name != label)]


def _chosen(schema: Any, columns: tuple[str, str]) -> str:
    """Return the requested image column or, by default, the only image column; '' if there is not exactly one."""
    found = _image_columns(schema, columns[1])
    return find_column(found, columns[0]) or (found[0] if len(found) == 1 else "")


def _group(file: PurePath, opened: Any, group: int, columns: Sequence[str]) -> list[Any]:
    """Return columns of a row group as Arrow arrays; raise UserError if the row group is damaged."""
    try:
        table = opened.read_row_group(group, columns=[*columns], use_threads=False)
        return [table.column(column).combine_chunks() for column in columns]
    except (FileServerError, UserError):
        raise
    except Exception as error:  # a damaged file may raise any exception
        raise UserError(f"'{file}' is damaged in row group {group} ({one_line(error)}).") from None


def _field(images: Any, name: str) -> Any:
    """Return a field of a column of structs, or nulls if the field is missing; plain bytes are returned unchanged."""
    import pyarrow
    from pyarrow import compute, types

    if not types.is_struct(images.type):
        return images if name == "bytes" else pyarrow.nulls(len(images))
    has_field = any(field.name == name for field in images.type)
    return compute.struct_field(images, name) if has_field else pyarrow.nulls(len(images))


def scan(columns: tuple[str, str], file: Path) -> Index:
    """Read a Parquet file once and return its index, or raise a UserError; `columns` are those of images and labels."""
    opened = _opened(file)
    from pyarrow import compute

    schema = opened.schema_arrow
    images, labels = _chosen(schema, columns), find_column(schema.names, columns[1])
    if not images or not labels:
        raise UserError(
            f"'{file}' has the columns {one_line(', '.join(schema.names))}: use --label-column NAME, and "
            "--path-column NAME for the column with the images."
        )
    if str(schema.field(labels).type) in ("halffloat", "float", "double"):
        raise UserError(f"'{file}': column {labels} has numbers with a fraction: use --label-column NAME.")
    facts = FactColumns(schema.names, [images, labels])
    builder, left_out, first = ImagesBuilder(), 0, 0
    for group in range(opened.num_row_groups):
        size = opened.metadata.row_group(group).total_byte_size
        if size > MOST_GROUP_BYTES:
            raise UserError(
                f"'{file}' has a row group of {size / 1e9:.1f} GB, which is read as a whole: write smaller row groups."
            )
        read = _group(file, opened, group, (images, labels, *facts.of_facts.values()))
        sizes = compute.binary_length(_field(read[0], "bytes"))
        cells = (column.to_pylist() for column in (sizes, _field(read[0], "path"), *read[1:]))
        for row, (length, path, value, *known) in enumerate(zip(*cells, strict=True)):
            try:
                label = label_of(value)
                if length is None or label is None:
                    left_out += 1
                    continue
                found = facts.facts(dict(zip(facts.of_facts.values(), known, strict=True)))
            except ValueError as error:
                raise UserError(f"'{file}', row {first + row + 1}: {error}: use --label-column NAME.") from None
            name = clean(str(path or "")) or f"{file.stem}-{first + row:09}"
            builder.add(name, label, found, state=(length, 0), place=group << ROW_BITS | row)
        first += opened.metadata.row_group(group).num_rows
    return Index(builder.build(file.parent), _label_names(schema, labels), left_out, unused=tuple(facts.unused))


def _label_names(schema: Any, column: str) -> list[str]:
    """Return the class names of a ClassLabel column; [] for other columns."""
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        names = json.loads((schema.metadata or {})[METADATA])["info"]["features"][column]["names"]
        return [name for name in names if type(name) is str]
    return []


class ParquetArchive(Archive):
    """Reads images from Parquet files, and caches the most recently used row groups; for the columns, see `scan`.

    The state of a file is its size in bytes and its modification time in ns.
    """

    def __init__(self, columns: tuple[str, str], files: Sequence[PurePath], states: Sequence[tuple[int, int]]) -> None:
        self.files, self._columns, self._states = files, columns, states
        self._groups: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def read(self, file: int, place: int, size: int) -> bytes:
        """See `Archive`."""
        key, row = (file, place >> ROW_BITS), place & ((1 << ROW_BITS) - 1)
        if key in self._groups:
            self._groups.move_to_end(key)
        else:
            self._groups[key] = self._group(*key)
            while len(self._groups) > 1 and sum(group.nbytes for group in self._groups.values()) > CACHE_BYTES:
                self._groups.popitem(last=False)
        group = self._groups[key]
        content = group[row].as_py() if row < len(group) else None
        if content is None or len(content) != size:
            raise UserError(f"'{self.files[file]}' has changed since the run began: start again.")
        return content

    def _group(self, number: int, group: int) -> Any:
        file = self.files[number]
        opened = _opened(file)
        status = os.stat(file)
        if (status.st_size, status.st_mtime_ns) != self._states[number]:
            raise UserError(f"'{file}' has changed since the run began: start again.")
        (images,) = _group(file, opened, group, [_chosen(opened.schema_arrow, self._columns)])
        return _field(images, "bytes")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_groups": OrderedDict()}


def _of_hub(options: DataOptions) -> Images:
    """Return the images of a data set on the Hub, or of one of its splits, or raise a UserError."""
    from huggingface_hub import constants, snapshot_download

    name, _, split = options.data.partition(":")[2].partition(":")
    organization, _, rest = name.partition("/")
    repository, _, inner = rest.partition("/")
    repository = f"{organization}/{repository}"
    snapshot = partial(snapshot_download, repository, repo_type="dataset", allow_patterns=f"*{SUFFIX}")
    try:
        folder = Path(snapshot(local_files_only=not options.download))
    except Exception as error:  # a wrong name, a network error, missing permissions
        if options.download:
            raise UserError(f"hf:{repository} could not be downloaded: {redacted(one_line(error))}.") from None
        raise UserError(
            f"hf:{repository} is not in {constants.HF_HUB_CACHE}: add --download, or use ORG/NAME as on the hub."
        ) from None
    files = [file.relative_to(folder) for file in folder.rglob(f"*{SUFFIX}")]
    configurations = sorted({str(file.parent) for file in files})
    if inner or len(configurations) == 1:
        folder /= inner or configurations[0]
    elif len({file.name for file in files}) < len(files):
        raise UserError(f"hf:{repository} has {', '.join(configurations)}: use hf:{repository}/{configurations[0]}.")
    found = archives.read(kind_of(options), replace(options, data=str(folder)))
    if not split:
        return in_parts(found, options)
    parts = sorted(found.words["part"])
    if split not in parts:
        raise UserError(f"hf:{repository} has no split {one_line(split)}, only {', '.join(filter(None, parts))}.")
    chosen = found.take(np.flatnonzero(found["part"] == found.words["part"].index(split)))
    return chosen.renamed("part", dict.fromkeys(parts, TRAIN), PARTS)
