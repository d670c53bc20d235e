"""Describes the environment of a run: versions, code, hardware and command.

Importing this module does not import torch, because launchers and `doctor` use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zerovision import __version__
from zerovision.training.base.control_groups import cpu_quota, usable_cores
from zerovision.training.base.files import sha256_of
from zerovision.training.base.run_folder import CHECKOUT, REPO_ROOT

if TYPE_CHECKING:
    from zerovision.models.build import BuiltModel
    from zerovision.training.data.datasets import DatasetPair
    from zerovision.training.world.world import World

LIBRARIES = ("torch", "torchvision", "deepspeed", "timm")  # must have the same version on all machines of a run
PACKAGES = (*LIBRARIES, "tensorboard", "numpy", "pillow", "safetensors")
CODE = ("models", "zerovision", "scripts", "deepspeed_configs") if CHECKOUT else (".",)
CODE_SUFFIXES = (".py", ".sh", ".json", ".c")

T = TypeVar("T")


def describe_run(world: World, precision: str, data: DatasetPair, built: BuiltModel) -> dict[str, Any]:
    """Return a description of the run's environment, ready for JSON."""
    import psutil
    import torch

    from zerovision.training.data.reading.sources import FileSource

    return {
        "command": shlex.join(sys.argv),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {"zerovision": __version__} | {name: package_version(name) for name in PACKAGES},
        "git_commit": git("rev-parse", "HEAD"),
        "git_has_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "ranks": world.size,
        "ranks_per_machine": world.local_size,
        "device": world.describe(),
        "cuda": torch.version.cuda if world.device.type == "cuda" else None,
        "cpu_cores": usable_cores(),
        "cpu_quota": None if cpu_quota() == math.inf else cpu_quota(),
        "memory_bytes": psutil.virtual_memory().total,
        "precision": precision,
        "data_fingerprint": data.fingerprint,
        "data_folder": str(source.images.root) if isinstance(source := data.train.source, FileSource) else None,
        "training_images": len(data.train),
        "validation_images": len(data.val),
        "test_images": len(data.test) if data.test else 0,
        "model": built.description.to_dict(),
    }


def software(plugins: str = "") -> dict[str, str]:
    """Return what must match on all machines: the versions of Python and libraries, and hashes of code and plug-ins."""
    libraries = {name: package_version(name) or "none" for name in LIBRARIES}
    found = {"Python": platform.python_version(), **libraries, "code": code_fingerprint(REPO_ROOT)}
    for path in (file.rpartition("@")[0] for file in plugins.split(",") if file):
        found[path] = "none"
        with contextlib.suppress(OSError):
            found[path] = sha256_of(Path(path))
    return found


def code_fingerprint(root: Path) -> str:
    """Return a SHA-256 hash of the names and contents of all code files, including uncommitted changes."""
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted(path for path in (root / folder).rglob("*") if path.suffix in CODE_SUFFIXES):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def usual_value(values: Sequence[T], decisive: T) -> T:
    """Return the most frequent value; `decisive` wins a tie."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value == decisive))


def package_version(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git(*arguments: str) -> str | None:
    """Return git's output for this repository, even if its files have another owner; None if git fails."""
    if not CHECKOUT:  # site-packages may be inside another repository
        return None
    command = ["git", "-c", "safe.directory=*", "-C", str(REPO_ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
