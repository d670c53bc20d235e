"""Files and folders that get their names only when complete, text files from users, CSV files, and hashes."""

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
# safetensors 0.8 writes to a file with such a name next to its target, then renames the file. If the process is killed,
# the file remains.
_OF_SAFETENSORS = re.compile(r"\.tmp[A-Za-z0-9]{6}")
SECONDS_OF_OTHERS = 86400.0  # after this long without a change, another machine's files are considered abandoned
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)  # fsync errors: folders on CIFS, some FUSE servers
LOOK_SECONDS = 0.1


def sync_to_disk(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on disk, if the file system supports that."""
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
    """Convert an OSError to a UserError that says that `place` cannot be written, or that a different file failed.

    Args:
        place: the file or folder to write.
        cure: a sentence that says what to do if `place` cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason, file = error.strerror or error, error.filename
        if isinstance(file, str) and not _is_of(Path(os.path.realpath(place)), Path(os.path.realpath(file))):
            raise UserError(f"cannot use '{file}': {reason}.") from error
        raise UserError(f"cannot write to '{place}': {reason}.{cure and f' {cure}'}") from error


def _is_of(place: Path, file: Path) -> bool:
    """Return whether `file` is `place`, inside it, one of its parent folders, or an unfinished version of it."""
    below = file.relative_to(place.parent).parts if file.is_relative_to(place.parent) else ("",)
    return file in place.parents or below[0] == place.name or below[0].startswith(f".{place.name}.")


@contextmanager
def replacing(path: Path, *, durable: bool = False, follows: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path`; the file written there replaces `path` if the block ends without an error.

    After a failure, the old file is unchanged and the temporary file is removed.

    Args:
        path: the file to replace.
        durable: whether to wait until the new contents, and then the new name, are on disk.
        follows: whether to keep a symbolic link and replace the file that it points to; anything that is not a regular
            file, such as `/dev/null`, is written directly.
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
    """Yield an empty folder next to `folder`; it replaces `folder` if the block ends without an error.

    If `folder` is a symbolic link, the folder that it points to is replaced.
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
    """Yield a path for a library to write to; the file durably replaces `path` if the block ends without an error.

    The yielded path is in a separate folder, so that everything that a killed process leaves there is removed with the
    folder; see `remove_leftovers`. The file gets the permissions of any new file (umask, ACLs), no matter what the
    library sets.
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
    """Return this process's temporary name for `path`, in the same folder; `kind` is 'new', 'old' or 'tmp'."""
    owner = f".{process_space()}+{os.getpid()}+{process_start_ticks('self')}.{kind}"
    return path.with_name(f".{first_bytes(path.name, 254 - len(owner))}{owner}")


def first_bytes(name: str, most: int) -> str:
    """Return the start of a file's name that has at most `most` bytes (file systems allow 255), in whole characters."""
    return next(name[:end] for end in range(most, -1, -1) if len(os.fsencode(name[:end])) <= most)


def remove_leftovers(folder: Path, ours: Collection[str] = (), *, of_library: bool = False) -> None:
    """Remove the unfinished files and folders of dead processes from a folder.

    Whether a process is still running is visible only on its own machine and in its own container. A folder that was
    moved aside for a replacement that never came gets its name back.

    Args:
        folder: the folder to clean up.
        ours: names of files that no other process is writing.
        of_library: whether to also remove safetensors' own unfinished files. Their names do not show what they are, so
            use this only for folders to which nothing else writes.
    """
    with contextlib.suppress(OSError):  # leftovers that cannot be listed or removed do no harm
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
    """Return whether a process has the file open, as safetensors does while it writes."""
    facts = path.stat()
    if os.geteuid() not in (0, facts.st_uid) and _is_recent(path):  # another user's processes are not visible
        return True
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # already closed, or owned by another user
            if os.path.samestat(descriptor.stat(), facts):
                return True
    return False


@functools.cache
def process_space() -> str:
    """Return the name of the machine and container in which this process's id is valid."""
    host = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname())[:60] or "host"
    return f"{host}+{os.stat('/proc/self/ns/pid').st_ino}"


def process_start_ticks(pid: str) -> str:
    """Return a process's start time in clock ticks since boot, or '' if no process has that id."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def existing_part(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())


def leave_mark(folder: Path) -> Path:
    """Create a marker file in a folder, or in its nearest existing parent; the caller removes the file.

    Raises:
        OSError: if the file cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=existing_part(folder), prefix=".zerovision-shared-")
    os.close(handle)
    return Path(name)


def sees_mark(mark: Path, seconds: float) -> bool:
    """Return whether another machine's mark exists, or appears within `seconds`.

    The client of a network file system may cache for a while that a file does not exist. The client queries the server
    again when a folder is opened (close-to-open consistency, nfs(5)), so the mark's folder and its parent are opened
    before each check.
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
# Characters that begin a formula, including whitespace that a spreadsheet strips, and the full-width forms in Chinese
# and Japanese input: https://owasp.org/www-community/attacks/CSV_Injection
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def read_small_text(path: Path, largest_bytes: int = LARGEST_BYTES) -> str:
    """Return the text of a small regular file in UTF-8.

    Raises:
        OSError: if the file is missing, unreadable, not a regular file, or larger than `largest_bytes`.
        ValueError: if the file is not UTF-8.
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
    """Return the sha256 of a file's contents, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def csv_line(row: Iterable[Any]) -> str:
    r"""Return a row as inert CSV text that ends in \n, for a file opened with `newline=""`.

    Python's writer quotes a line break in a cell only if the writer's own line terminator contains it, but readers end
    a row at any of \n, \r and \r\n.
    """
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(inert(row))
    return line.getvalue().removesuffix("\r\n") + "\n"


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a header and rows to a file; bytes in file names that are not valid text are preserved."""
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        stream.writelines(map(csv_line, (header, *rows)))


def inert(row: Iterable[Any]) -> list[Any]:
    """Return a row with a single quote before each text that could start a formula; numbers are unchanged."""
    return [f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA_STARTS) else cell for cell in row]


def as_given(cell: str) -> str:
    """Return the text that a cell had before `inert`."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(FORMULA_STARTS) else cell
