"""Which versions this Python and this repository are at, and which are usual; imports no torch."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from training.config import REPO_ROOT

LIBRARIES = ("torch", "torchvision", "deepspeed", "timm")  # that all machines of a training need in the same version
CODE = ("models", "training", "planning", "delivery", "launch", "scripts", "deepspeed_configs")
CODE_SUFFIXES = (".py", ".sh", ".json", ".c")

T = TypeVar("T")


def software() -> dict[str, str]:
    """Return what all machines of a training must have in common: Python, the libraries, and our code (a hash)."""
    libraries = {name: package_version(name) or "none" for name in LIBRARIES}
    return {"Python": platform.python_version(), **libraries, "code": code_fingerprint(REPO_ROOT)}


def code_fingerprint(root: Path) -> str:
    """Return a sha256 over names and content of the code that a training runs, changed files included."""
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted(path for path in (root / folder).rglob("*") if path.suffix in CODE_SUFFIXES):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def usual_value(values: Sequence[T], decisive: T) -> T:
    """Return what most of the values are; if there are as many of two, the decisive one."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value == decisive))


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
