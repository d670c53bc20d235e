"""Plug-ins: `--plugin FILE.py` loads a user's own file, which adds entries to our tables, in every process of a run.

A plug-in is code, so only files that the user names are loaded, never files that a run, a checkpoint or a hub names.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zerovision.training.base.errors import UserError, one_line, shown

FLAG = "--plugin"
USAGE = "A Python file that adds networks, augmentations and so on (see examples/); may be repeated."
IN_FILES = "plugins"  # key in weights files for the result of `names_of`
DIGITS = 16  # number of digits of the sha256, enough to detect that a file has changed
_LOADED: dict[str, str] = {}  # FILE@SHA256 by module name


def load_plugins(files: str) -> str:
    """Import comma-separated files, each once per process.

    Returns:
        `FILE@SHA256,...` with absolute paths; `files` may also have this form.

    Raises:
        UserError: for a file that cannot be imported, or whose hash has changed.
    """
    return ",".join(_load(file.strip()) for file in files.split(",") if file.strip())


def _load(file: str) -> str:
    given, _, wanted = file.partition("@") if re.search(f"@[0-9a-f]{{{DIGITS}}}$", file) else (file, "", "")
    path = Path(os.path.abspath(os.path.expanduser(given)))
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"{FLAG} {shown(given)}: cannot be read ({getattr(error, 'strerror', error)}).") from None
    digest = hashlib.sha256(content).hexdigest()[:DIGITS]
    if wanted and digest != wanted:
        raise UserError(f"{FLAG} {given}: the file has changed: its sha256 begins with {digest}, not with {wanted}.")
    name = f"zerovision_plugin_{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}_{digest}"
    if name in _LOADED:
        return f"{path}@{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise UserError(f"{FLAG} {given}: expected a file whose name ends with .py.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(content, path, "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        frame = error.__traceback__.tb_next if error.__traceback__ else None
        line = f", line {frame.tb_lineno}" if frame else ""
        raise UserError(f"{FLAG} {given}{line}: {type(error).__name__}: {one_line(error).rstrip('.')}.") from error
    _LOADED[name] = f"{path}@{digest}"
    return _LOADED[name]


def files_in(words: Sequence[str]) -> str:
    """Return the `--plugin` values of a command line that has not been parsed yet."""
    pairs = ((*word.partition("="), after) for word, after in zip(words, [*words[1:], ""], strict=False))
    return ",".join(value if equals else after for flag, equals, value, after in pairs if flag == FLAG)


def names_of(files: str) -> list[str]:
    """Return `NAME@SHA256`, without folders, for each file in a result of `load_plugins`."""
    return [os.path.basename(file) for file in files.split(",") if file]


def loaded() -> str:
    """Return the files loaded so far, in the form that `load_plugins` returns."""
    return ",".join(_LOADED.values())


def require_plugins(what: str, needed: Iterable[Any]) -> list[str]:
    """Check that plug-ins with these names are loaded; return the loaded plug-ins whose contents have changed.

    Raises:
        UserError: if a plug-in is not loaded.
    """
    here = {name.rpartition("@")[0]: name for name in names_of(loaded())}
    for file in (str(name).rpartition("@")[0] for name in needed):
        if file not in here:
            raise UserError(
                f"{what} was made with {FLAG} {shown(file)}, which is never loaded automatically: add {FLAG} FILE."
            )
    return [*{*here.values()}.difference(map(str, needed))]


class LoadedPlugins:
    """Represents the plug-ins loaded in this process; a process that unpickles an instance loads the same files."""

    def __reduce__(self) -> tuple[Any, ...]:
        return load_plugins, (loaded(),)
