"""Files and folders that get their names only when complete; text files of a user, CSV files, and hashes."""

from __future__ import annotations

import contextlib
import csv
import errno
import functools
import hashlib
import io
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerovision.training.base.errors import UserError

# name, owner, kind: .model.safetensors.node01+4026531836+4711+99887766.tmp
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.(?P<owner>(?P<host>[^+]+\+\d+)\+(?P<pid>\d+)\+\d+)\.(?P<kind>new|old|tmp)")
# What safetensors 0.8 writes beside the file that it was asked for, and renames; a killed program leaves it.
_OF_SAFETENSORS = re.compile(r"\.tmp[A-Za-z0-9]{6}")
SECONDS_OF_OTHERS = 86400.0  # another machine's files count as left behind after so long without a change
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)  # that of folders on CIFS, and of some FUSE servers
LOOK_SECONDS = 0.1


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, is on disk, if the file system supports that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def errors_of_writing(place: Path, cure: str = "") -> Iterator[None]:
    """Raise a UserError instead of an OSError: that nothing can be written there, or that another file failed.

    Args:
        place: the file or folder.
        cure: what to do if nothing can be written there, a sentence.
    """
    try:
        yield
    except OSError as error:
        reason, file = error.strerror or error, error.filename
        if isinstance(file, str) and not _is_of(Path(os.path.realpath(place)), Path(os.path.realpath(file))):
            raise UserError(f"cannot use '{file}': {reason}.") from error
        raise UserError(f"cannot write into '{place}': {reason}.{cure and f' {cure}'}") from error


def _is_of(place: Path, file: Path) -> bool:
    """Return whether writing `place` involves a file: below it, above it, or unfinished beside it."""
    if file in place.parents:
        return True
    below = file.relative_to(place.parent).parts if file.is_relative_to(place.parent) else ("",)
    return below[0] == place.name or below[0].startswith(f".{place.name}.")


@contextmanager
def replacing(path: Path, *, durable: bool = False, follows: bool = False) -> Iterator[Path]:
    """Yield a name beside `path` to write to; the file replaces `path` if the block ends without error.

    A failure leaves the old file, and nothing beside it.

    Args:
        path: the file.
        durable: whether to wait until the new content, and then its name, are on disk.
        follows: whether to keep a link and replace the file that it points to; what is not a file, such as `/dev/null`,
            is written directly.
    """
    if follows:
        if path.exists() and not path.is_file():
            yield path
            return
        path = Path(os.path.realpath(path))
    temporary = unfinished(path, "tmp")
    try:
        yield temporary
        if durable:
            sync_to_disk(temporary)
        os.replace(temporary, path)
        if durable:
            sync_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder` to fill; it replaces `folder` if the block ends without error.

    A link stays, and the folder that it points to is replaced.
    """
    folder = Path(os.path.realpath(folder))
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


@contextmanager
def replacing_by_library(path: Path) -> Iterator[Path]:
    """Yield a name for a library to write to; the file replaces `path`, durably, if the block ends without error.

    The name is in a separate folder: if the library is killed, its leftovers are removed with the folder, see
    `remove_leftovers`. The file gets the permissions of any new file (umask, ACLs), whatever the library sets.
    """
    folder = unfinished(path, "tmp")
    folder.mkdir(exist_ok=True)
    try:
        made, plain = folder / path.name, folder / "plain"
        yield made
        plain.touch()
        if made.stat().st_mode != plain.stat().st_mode:
            made.chmod(plain.stat().st_mode & 0o777)
        sync_to_disk(made)
        os.replace(made, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, content: Any) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def unfinished(path: Path, kind: str) -> Path:
    """Return the name beside `path` under which this process prepares it; `kind` is 'new', 'old' or 'tmp'."""
    return path.with_name(f".{path.name[:100]}.{process_space()}+{os.getpid()}+{process_start_ticks('self')}.{kind}")


def check_renames(folder: Path) -> None:
    """Rename a folder with a file in it, and a file over another, as every save does; leave nothing behind.

    Raises:
        OSError: if the file system cannot do that, such as a mounted object store.
    """
    place = unfinished(folder / "renames", "tmp")
    try:
        (place / "new").mkdir(parents=True)
        for name in ("file", "other"):
            (place / "new" / name).write_text(name)
        (place / "new").rename(place / "old")
        os.replace(place / "old" / "file", place / "old" / "other")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def remove_leftovers(folder: Path, ours: Collection[str] = (), *, of_library: bool = False) -> None:
    """Remove the unfinished files and folders of dead processes from a folder.

    Whether a process lives is visible only from its own machine and container. A folder that was moved aside
    to be replaced, but never was, gets its name back.

    Args:
        folder: the folder.
        ours: names of files that no other process is writing.
        of_library: whether to remove safetensors' own unfinished files too. Their names do not show what they are, so
            do this only in folders in which nothing else writes.
    """
    with contextlib.suppress(OSError):  # nothing depends on what cannot be listed or removed
        for path in list(folder.iterdir()):
            if of_library and _OF_SAFETENSORS.fullmatch(path.name) and path.is_file() and not _is_being_written(path):
                path.unlink(missing_ok=True)
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
    if found["host"] == process_space():
        return found["owner"] == f"{process_space()}+{found['pid']}+{process_start_ticks(found['pid'])}"
    return _is_recent(path)


def _is_recent(path: Path) -> bool:
    return time.time() - path.lstat().st_mtime < SECONDS_OF_OTHERS


def _is_being_written(path: Path) -> bool:
    """Return whether a process has the file open, as safetensors does until the end, or whether another user's process
    may.
    """
    facts = path.stat()
    if os.geteuid() not in (0, facts.st_uid) and _is_recent(path):
        return True
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # closed by now, or of another user
            if os.path.samestat(descriptor.stat(), facts):
                return True
    return False


@functools.cache
def process_space() -> str:
    """Return the machine and container in which our process ids are valid."""
    host = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname())[:60] or "host"
    return f"{host}+{os.stat('/proc/self/ns/pid').st_ino}"


def process_start_ticks(pid: str) -> str:
    """Return when a process started, in clock ticks since boot; '' if no process has that id."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def existing_part(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())


def leave_mark(folder: Path) -> Path:
    """Write a file into a folder, or into the nearest existing one above it; the caller removes it.

    Raises:
        OSError: if nothing can be written there.
    """
    handle, name = tempfile.mkstemp(dir=existing_part(folder), prefix=".zerovision-shared-")
    os.close(handle)
    return Path(name)


def sees_mark(mark: Path, seconds: float) -> bool:
    """Return whether another machine's mark exists, or appears within this many seconds.

    A client of a network disk may cache a missing name for a while. It asks its server again when a folder is opened
    (close-to-open consistency, nfs(5)), so the mark's folder and its parent are opened before each check.
    """
    deadline = time.monotonic() + seconds
    while True:
        for folder in (mark.parent.parent, mark.parent):
            with contextlib.suppress(OSError):
                os.scandir(folder).close()
        if os.path.exists(mark):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)


LARGEST_BYTES = 2**20
# What begins a formula, also after a spreadsheet has taken off white space, and in the full width of Chinese and
# Japanese input: https://owasp.org/www-community/attacks/CSV_Injection
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def read_small_text(path: Path, largest_bytes: int = LARGEST_BYTES) -> str:
    """Return the text of a small regular file in UTF-8.

    Raises:
        OSError: if the file is missing, unreadable, not a regular file, or larger than `largest_bytes`.
        ValueError: if it is not UTF-8.
    """
    # without O_NONBLOCK, opening a named pipe without a writer blocks
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        content = stream.read(largest_bytes + 1)
    if len(content) > largest_bytes:
        raise OSError(errno.EFBIG, f"larger than {largest_bytes >> 10} KiB")
    return content.decode("utf-8")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's content, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def csv_line(row: Iterable[Any]) -> str:
    r"""Return an inert row for a file opened with `newline=""`; it ends in \n.

    Python's writer quotes a line break in a cell only if it is one of those that end its rows, and readers end a row at
    each of \n, \r and \r\n.
    """
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(inert(row))
    return line.getvalue().removesuffix("\r\n") + "\n"


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a file of rows under a header; file names keep bytes that are not text."""
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        stream.writelines(map(csv_line, (header, *rows)))


def inert(row: Iterable[Any]) -> list[Any]:
    """Return a row whose texts cannot start a formula: those that would get a single quote in front; numbers stay."""
    return [f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA_STARTS) else cell for cell in row]


def as_given(cell: str) -> str:
    """Return the text that `inert` was given."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(FORMULA_STARTS) else cell
