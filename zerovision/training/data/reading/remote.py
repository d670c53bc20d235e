"""Reads files from URLs with fsspec, with a time limit and retries.

The packages that fsspec uses find credentials on their own: in `~/.aws`, in `~/.netrc`, or from `hf auth login`. A URL
that contains credentials is an error, because logs and the run's folder would contain it. Messages never contain a
redirect's target.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import re
from pathlib import PurePath, PurePosixPath
from typing import Any

from zerovision.training.base.errors import UserError, either, one_line
from zerovision.training.data.reading.retry import patiently

PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
REQUEST_SECONDS = 30.0
# Fields that change with a file's contents, as named by servers and fsspec's packages.
MARKS = ("ETag", "etag", "Content-MD5", "Last-Modified", "LastModified", "md5Hash", "generation", "blob_id", "lfs")
UNMARKED = 0
MARK_NS = 10**9  # a mark is a time in whole seconds before 2038, which every file system can store
_MAY_PASS = (408, 429)  # HTTP status codes below 500 that may be temporary
_SECRETS = re.compile(r"(?<=://)[^/\s]*@|[?#][^\s'\"]+")

State = tuple[int, int]  # size in bytes, and a mark that changes with the contents (local files: the time)


class RemotePath(PurePosixPath):
    """A URL with the interface of a path."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def redacted(text: str) -> str:
    """Return `text` without the users, passwords and queries in its URLs."""
    return _SECRETS.sub("***", text)


def check_url(text: str) -> bool:
    """Return whether `text` is a URL; raise UserError if it is invalid, or has parts that logs must not contain."""
    scheme, separator, rest = text.partition("://")
    given = f"--data {redacted(text)}"
    if separator and (scheme not in PACKAGES or not rest.strip("/")):
        schemes = either(f"{name}://" for name in PACKAGES)
        raise UserError(f"{given}: expected a path, or a URL that begins with {schemes}.")
    if separator and ("@" in rest.partition("/")[0] or "?" in rest or "#" in rest):
        raise UserError(
            f"{given}: a user, password, query or fragment would appear in logs: remove it from the URL, and "
            f"store credentials where {PACKAGES[scheme]} finds them (~/.netrc, ~/.aws, hf auth login)."
        )
    return bool(separator)


@functools.cache
def _file_system(scheme: str, process: int) -> Any:
    """Return fsspec's file system for this process; each process needs its own."""
    options: dict[str, Any] = {} if scheme == "hf" else {"use_listings_cache": False}
    if scheme in ("http", "https"):
        options["client_kwargs"] = {"trust_env": True}  # ~/.netrc, and proxies
    try:
        import fsspec

        return fsspec.filesystem(scheme, skip_instance_cache=True, **options)
    except ImportError:
        package = PACKAGES[scheme]
        raise UserError(f"{scheme}:// needs fsspec and {package}: pip install fsspec {package}.") from None


def _ask_once(file: PurePath, method: str, **options: Any) -> Any:
    system = _file_system(str(file).partition("://")[0], os.getpid())
    try:
        if not system.async_impl:
            return getattr(system, method)(str(file), **options)
        from fsspec.asyn import sync

        return sync(system.loop, getattr(system, f"_{method}"), str(file), timeout=REQUEST_SECONDS, **options)
    except Exception as error:  # each package raises its own exceptions
        raise _as_os_error(error) from None


def ask(file: PurePath, method: str, **options: Any) -> Any:
    """Call a method of fsspec's file system on a file, with retries (see `patiently`), or raise a permanent OSError."""
    return patiently(functools.partial(_ask_once, file, method, **options), file)


def _as_os_error(error: BaseException) -> OSError:
    """Return an OSError whose errno shows whether the error may be temporary, and whose reason contains no secrets."""
    if isinstance(error, FileNotFoundError) and error.__cause__:  # fsspec raises it for any HTTP error
        error = error.__cause__
    holders = (error, getattr(error, "response", None))
    codes = (getattr(holder, name, None) for holder in holders for name in ("status", "status_code", "code"))
    status = next((code for code in codes if type(code) is int), 0)
    text = f"HTTP {status}" if status else redacted(one_line(error)) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        text = "there is no such file"
    if isinstance(error, TimeoutError):
        text = f"no answer within {REQUEST_SECONDS:g} s"
    is_final = isinstance(error, (FileNotFoundError, PermissionError, ValueError)) or "Credentials" in repr(type(error))
    is_final |= 400 <= status < 500 and status not in _MAY_PASS
    return OSError(errno.EINVAL if is_final else errno.EIO, text)


def state_of(file: PurePath) -> State:
    """Return a file's size and mark (`UNMARKED` if the server sends none); raise OSError if the size is unknown."""
    facts = ask(file, "info")
    if type(facts.get("size")) is not int:
        raise OSError(errno.EINVAL, "its size is not known")
    marks = [(name, facts[name]) for name in MARKS if facts.get(name)]
    number = int.from_bytes(hashlib.sha256(repr(marks).encode()).digest()[:4], "big") >> 1 or 1
    return facts["size"], number * MARK_NS if marks else UNMARKED


def files_below(folder: RemotePath) -> list[RemotePath]:
    """Return the files in a folder and its direct subfolders, sorted; for errors, see `ask`."""
    own = _entries(folder)
    inner = [_entries(path) for path, is_folder in own.items() if is_folder]
    return sorted(path for entries in (own, *inner) for path, is_folder in entries.items() if not is_folder)


def _entries(folder: RemotePath) -> dict[RemotePath, bool]:
    """Return a folder's entries, and whether each is a folder; HTTP links that lead out of the folder are ignored."""
    names = {entry["name"]: entry["type"] == "directory" for entry in ask(folder, "ls", detail=True)}
    scheme = str(folder).partition("://")[0]
    found = {RemotePath(n if "://" in n else f"{scheme}://{n}"): is_folder for n, is_folder in names.items()}
    return {path: is_folder for path, is_folder in found.items() if path.parent == folder and path.name[0] not in ".?"}
