"""What a run was made with: versions, code, hardware, command."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from training.config import REPO_ROOT
from training.distributed import World

PACKAGES = ("torch", "torchvision", "deepspeed", "timm", "tensorboard", "numpy", "pillow", "safetensors")


def describe_environment(world: World) -> dict[str, Any]:
    """Return what is needed to tell two runs apart, ready for JSON."""
    return {
        "command": shlex.join(sys.argv),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_has_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "ranks": world.size,
        "device": world.describe(),
        "cuda": torch.version.cuda if world.device.type == "cuda" else None,
        "cpu_cores": psutil.cpu_count(logical=True),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(REPO_ROOT), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
