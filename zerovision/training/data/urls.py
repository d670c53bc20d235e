"""Data at URLs: tar and Parquet files, with indexes next to them, and tables of images under the table's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import torch
from filelock import FileLock

from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.units import plural
from zerovision.training.data import ARCHIVES, TABLE_EXTENSIONS, DataOptions, archives, parquet, table
from zerovision.training.data.archives import (
    CACHE,
    CLASS_NAMES,
    Index,
    Kind,
    index_from,
    index_of,
    kept_index_of,
    write_index,
)
from zerovision.training.data.class_names import clean
from zerovision.training.data.division import in_parts
from zerovision.training.data.images import Images, ImagesBuilder
from zerovision.training.data.reading.remote import UNMARKED, RemotePath, State, ask, files_below, state_of
from zerovision.training.data.reading.remote_files import CONNECTIONS, Copies, RemoteArchive, checksum_of
from zerovision.training.data.tar_shards import TarArchive
from zerovision.training.data.tar_shards import kind_of as kind_of_tar

COPIES = "remote"  # under --data-root


def listing(options: DataOptions) -> Images:
    """Return the images at a URL; raise a UserError, or a FileServerError if the server does not answer any retry."""
    root = RemotePath(options.data)
    if root.suffix.lower() in TABLE_EXTENSIONS:
        copies = _copies([root], [_state(root)], options)
        with _reading(copies, 0) as copy:
            lines = table.lines_of(*table.csv_rows(copy, options), root.parent, options)
        return _with_states(root.parent, lines, options)
    try:
        files = [root] if root.suffix in ARCHIVES else files_below(root)
    except OSError as error:
        raise UserError(f"'{root}' cannot be read: {error.strerror}.") from None
    suffix = next((file.suffix for file in files if file.suffix in ARCHIVES), "")
    if not suffix:
        raise UserError(
            f"--data {options.data}: no tar or Parquet file is listed there; pack folders of images into tar files: "
            "python scripts/pack.py DIR OUT."
        )
    kind = (parquet.kind_of if suffix == parquet.SUFFIX else kind_of_tar)(options)
    files = [file for file in files if file.suffix == suffix]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        copies = _copies(files, [*pool.map(_state, files)], options)
        note = _note(copies, options)
        indexes = [*pool.map(partial(_index, kind, options.root / CACHE, copies), range(len(files)))]
    root = root.parent if root.suffix in ARCHIVES else root
    archive = RemoteArchive(copies, kind.open(copies.paths, copies.states))
    found = archives.listing_of(root, indexes, archive, options, partial(ask, root / CLASS_NAMES, "cat_file"))
    return in_parts(replace(found, notes=[*found.notes, note]), options)


def _copies(files: Sequence[RemotePath], states: Sequence[State], options: DataOptions) -> Copies:
    folder = options.root / COPIES
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"'{folder}' cannot be created ({error.strerror}): use --data-root DIR.") from None
    return Copies(folder, int(options.remote_cache_gb * 1e9), files, states)


def _note(copies: Copies, options: DataOptions) -> str:
    """Return a note on where files are kept; raise UserError if they exceed the cache without --order shards."""
    size = sum(size for size, _ in copies.states)
    found = f"{size / 1e9:.3g} GB behind the URL"
    if size <= copies.max_bytes:
        return f"{found}, kept in {copies.folder} as they are read"
    if options.order != "shards":
        raise UserError(
            f"--data {options.data}: {found}, more than --remote-cache-gb {options.remote_cache_gb:g} keeps: use "
            "--order shards to fetch one shard after another in each epoch, or raise it."
        )
    return f"{found}, fetched again in each epoch, one shard after another"


def _index(kind: Kind, kept_in: Path, copies: Copies, number: int) -> Index:
    """Return an archive's index: the local copy, the index next to the archive, or a new index of the whole file.

    If the server sends nothing that changes with the contents, such as an ETag, the archive is fetched at each start,
    because only its contents show whether an index is up to date.
    """
    file, state = copies.files[number], copies.states[number]
    kept = kept_index_of(file, kept_in)
    kept_in.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{kept}.lock"):  # shared by the ranks of a machine
        index = index_from(kept.read_bytes)
        if index is None or (index.state, index.columns) != (state, kind.columns):
            index = index_from(partial(ask, index_of(file), "cat_file"))
        if index and ((index.state[0], index.columns) != (state[0], kind.columns) or not index.checksum):
            index = None
        if index is None or state[1] == UNMARKED:
            with _reading(copies, number) as copy:
                checksum = checksum_of(copy)
                if index is None or index.checksum != checksum:
                    index = kind.scan(copy)._replace(columns=kind.columns, checksum=checksum)
        index, copies.checksums[number] = index._replace(state=state), index.checksum
        with suppress(OSError):
            write_index(index, kept)
    return index


@contextmanager
def _reading(copies: Copies, number: int) -> Iterator[Path]:
    """Yield a local copy of a file, fetched anew if the file is `UNMARKED`; remove the copy if it cannot be read."""
    file, copy = copies.files[number], copies.paths[number]
    with FileLock(copies.folder / f".{copy.name}.lock"):  # shared by the ranks of a machine
        if copies.states[number][1] == UNMARKED:
            copy.unlink(missing_ok=True)
        copies.fetch(number)
        try:
            yield copy
        except (UserError, OSError) as error:
            if not copy.exists():
                raise UserError(f"'{file}' was removed while it was read: --remote-cache-gb is too small.") from None
            copy.unlink(missing_ok=True)
            raise UserError(str(error).replace(str(copy), str(file))) from None


def _with_states(root: RemotePath, lines: Images, options: DataOptions) -> Images:
    """Return a table's images with the sizes of their files, which must be under the table's folder."""
    is_quoted = str(root).startswith("http")
    paths = [os.path.normpath(clean(path).removeprefix(f"{root}/")) for path in lines.paths()]
    if outside := [path for path in paths if path.startswith(("/", ".."))]:
        raise UserError(
            f"--data {options.data}: {len(outside)} of {len(paths)} images are outside '{root}', such as "
            f"{shown(outside[0])}: a table behind a URL names only images under its folder."
        )
    files = {path: root / (quote(path) if is_quoted else path) for path in dict.fromkeys(paths)}
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        states = dict(zip(files, pool.map(_state_if_there, files.values()), strict=True))
    if missing := [path for path in paths if not states[path]]:
        raise UserError(
            f"--data {options.data}: {plural(len(missing), 'image')} of {len(paths)}, such as {shown(missing[0])}, "
            f"cannot be found under '{root}': use paths relative to the table."
        )
    known, numbers = [state for state in states.values() if state], {path: number for number, path in enumerate(files)}
    builder = ImagesBuilder()
    for path in paths:
        builder.add(path, None, state=known[numbers[path]])
    copies = _copies([*files.values()], known, options)
    for copy, (_, mark) in zip(copies.paths, known, strict=True):
        if mark == UNMARKED:
            copy.unlink(missing_ok=True)  # it may be a copy of an earlier version
    note = f"{sum(size for size, _ in known) / 1e9:.3g} GB behind the URL, kept in {copies.folder} as they are read"
    found, archive = lines.with_files(builder), RemoteArchive(copies, TarArchive(copies.paths, known), root)
    found.columns["file"][:] = torch.tensor([numbers[path] for path in paths])
    return replace(found, archive=archive, notes=[*lines.notes, note])


def _state_if_there(file: RemotePath) -> State | None:
    with suppress(OSError):
        return state_of(file)
    return None


def _state(file: RemotePath) -> State:
    try:
        return state_of(file)
    except OSError as error:
        raise UserError(f"'{file}' cannot be read: {error.strerror}.") from None
