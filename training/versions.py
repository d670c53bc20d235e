"""Which versions this Python and this repository are at; imports no torch."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version

from training.config import REPO_ROOT


def package_version(name: str) -> str | None:
    """Return an installed package's version; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git(*arguments: str) -> str | None:
    """Return what git says of this repository, whoever owns its files; None without git or where it fails."""
    command = ["git", "-c", "safe.directory=*", "-C", str(REPO_ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
