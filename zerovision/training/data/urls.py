"""Data behind URLs: tar and Parquet files, with their indexes beside them, and tables of images below their folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote

from filelock import FileLock

from zerovision.training.base.errors import UserError, shown
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
from zerovision.training.data.reading.remote import UNMARKED, RemotePath, State, ask, files_below, state_of
from zerovision.training.data.reading.remote_files import (
    BLOCK_BYTES,
    CONNECTIONS,
    PieceCache,
    RemoteFiles,
    RemoteImages,
    page_checksums,
)
from zerovision.training.data.records import Listing
from zerovision.training.data.tar_shards import kind_of as kind_of_tar

PIECES = "remote"  # below --data-root
WINDOWS_KEPT = 3  # of --order shards: at the start of an epoch its first, its last, and what a block has around them


def listing(options: DataOptions) -> Listing:
    """Return the images behind a URL.

    Raises:
        UserError: There is nothing that can be read, or it is damaged, or a package is missing.
        FileServerError: The server does not answer now.
    """
    root, cache = RemotePath(options.data), PieceCache(options.root / PIECES, int(options.remote_cache_gb * 1e9))
    try:
        cache.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"'{cache.folder}' cannot be made ({error.strerror}): give --data-root DIR.") from None
    if root.suffix.lower() in TABLE_EXTENSIONS:
        with _copied(root, _state(root), cache) as copy:
            lines = table.lines_of(*table.csv_rows(copy, options), options)
        return _images(root.parent, lines, options, cache)
    try:
        files = [root] if root.suffix in ARCHIVES else files_below(root)
    except OSError as error:
        raise UserError(f"'{root}' cannot be read: {error.strerror}.") from None
    suffix = next((file.suffix for file in files if file.suffix in ARCHIVES), "")
    if not suffix:
        raise UserError(
            f"--data {options.data}: no tar or Parquet file is listed there; of folders of images make tar files: "
            "python scripts/pack.py DIR OUT."
        )
    kind = (parquet.kind_of if suffix == parquet.SUFFIX else kind_of_tar)(options)
    files = [file for file in files if file.suffix == suffix]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        indexes = [*pool.map(partial(_index, kind, options.root / CACHE, cache), files)]
    images, share = max(1, sum(len(index.entries) for index in indexes)), 1.0
    if options.order == "shards":
        share = min(1.0, WINDOWS_KEPT * options.shuffle_window / images)
    states, checksums = [index.state for index in indexes], [index.checksums for index in indexes]
    remote = RemoteFiles(files, states, checksums, cache, share)
    root = root.parent if root.suffix in ARCHIVES else root
    found = archives.listing_of(
        root, files, indexes, kind.over(remote), options, partial(ask, root / CLASS_NAMES, "cat_file")
    )
    return found._replace(notes=[*found.notes, _note(remote, cache)])


def _note(remote: RemoteFiles, cache: PieceCache) -> str:
    how = f"kept in {cache.folder} as they are read"
    if remote.fits and not remote.stays:
        how = "fetched again in each epoch, one shard after another"
    elif not remote.fits:
        how = f"more than --remote-cache-gb {cache.max_bytes / 1e9:g} keeps: images are fetched again in each epoch"
    return f"{remote.bytes / 1e9:.3g} GB behind the URL, {how}"


def _index(kind: Kind, kept_in: Path, cache: PieceCache, file: RemotePath) -> Index:
    """Return the index of an archive: the one kept here, or that beside it, or a new one, for which all is fetched.

    All is fetched at each start if the server tells no change of the file: the content decides whether an index is its.
    """
    state, kept = _state(file), kept_index_of(file, kept_in)
    kept_in.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{kept}.lock"):  # the ranks of a machine
        index = index_from(kept.read_bytes)
        is_kept = index is not None and (index.state, index.columns) == (state, kind.columns)
        if index and is_kept and state[1] != UNMARKED:
            return index
        if not is_kept:
            index = index_from(partial(ask, index_of(file), "cat_file"))
        fits = index is not None and (index.state[0], index.columns) == (state[0], kind.columns) and index.checksums
        if index is None or not fits or state[1] == UNMARKED:
            with _copied(file, state, cache) as copy:
                checksums = page_checksums(copy)
                if index is None or not fits or index.checksums != checksums:
                    index = kind.scan(copy)._replace(columns=kind.columns, checksums=checksums)
        index = index._replace(state=state)
        with suppress(OSError):
            write_index(index, kept)
    return index


@contextmanager
def _copied(file: RemotePath, state: State, cache: PieceCache) -> Iterator[Path]:
    """Yield a copy of a file, which is removed afterwards; what it consists of stays in the cache."""
    remote, step = RemoteFiles([file], [state], [archives.NO_CHECKSUMS], cache), CONNECTIONS * BLOCK_BYTES
    remote.forget_unmarked()
    with tempfile.TemporaryDirectory(dir=cache.folder.parent) as folder:  # in the cache it might be removed
        copy = Path(folder) / file.name
        with copy.open("wb") as stream:
            for start in range(0, state[0], step):
                stream.write(remote.read(0, start, min(step, state[0] - start)))
        try:
            yield copy
        except UserError as error:
            remote.forget()
            raise UserError(str(error).replace(str(copy), str(file))) from None


def _images(root: RemotePath, lines: Listing, options: DataOptions, cache: PieceCache) -> Listing:
    """Return the lines of a table with the sizes of their files, which are below its folder."""
    records, is_quoted = lines.records, str(root).startswith("http")
    paths = [os.path.normpath(clean(record.path).removeprefix(f"{root}/")) for record in records]
    if outside := [path for path in paths if path.startswith(("/", ".."))]:
        raise UserError(
            f"--data {options.data}: {len(outside)} of {len(records)} images lie outside of '{root}', such as "
            f"{shown(outside[0])}: a table behind a URL names images below its folder."
        )
    files = {path: root / (quote(path) if is_quoted else path) for path in dict.fromkeys(paths)}
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        states = dict(zip(files, pool.map(_state_if_there, files.values()), strict=True))
    if missing := [path for path in paths if not states[path]]:
        raise UserError(
            f"--data {options.data}: {len(missing)} of {len(records)} images are missing below '{root}', such as "
            f"{shown(missing[0])}: paths are relative to the table."
        )
    known, numbers = [state for state in states.values() if state], {path: number for number, path in enumerate(files)}
    found = [
        record._replace(
            path=path, size=known[numbers[path]][0], changed_ns=known[numbers[path]][1], place=numbers[path]
        )
        for record, path in zip(records, paths, strict=True)
    ]
    remote = RemoteFiles([*files.values()], known, [archives.NO_CHECKSUMS] * len(files), cache)
    remote.forget_unmarked()
    notes = [*lines.notes, _note(remote, cache)]
    return lines._replace(root=root, records=found, archive=RemoteImages(root, remote), notes=notes)


def _state_if_there(file: RemotePath) -> State | None:
    with suppress(OSError):
        return state_of(file)
    return None


def _state(file: RemotePath) -> State:
    try:
        return state_of(file)
    except OSError as error:
        raise UserError(f"'{file}' cannot be read: {error.strerror}.") from None
