"""What a run was made with: versions, code, hardware, command."""

from __future__ import annotations

import platform
import shlex
import sys
from typing import Any

import psutil
import torch

from models.build import BuiltModel
from training.data.datasets import DatasetPair
from training.observe.versions import git, package_version
from training.parallel.world import World

PACKAGES = ("torch", "torchvision", "deepspeed", "timm", "tensorboard", "numpy", "pillow", "safetensors")


def describe_run(world: World, precision: str, data: DatasetPair, built: BuiltModel) -> dict[str, Any]:
    """Return the environment of a run with its data and its model, ready for JSON."""
    return describe_environment(world) | {
        "precision": precision,
        "data_fingerprint": data.fingerprint,
        "training_images": len(data.train),
        "validation_images": len(data.val),
        "model": built.description,
    }


def describe_environment(world: World) -> dict[str, Any]:
    """Return what is needed to tell two runs apart, ready for JSON."""
    return {
        "command": shlex.join(sys.argv),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "git_commit": git("rev-parse", "HEAD"),
        "git_has_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "ranks": world.size,
        "ranks_per_machine": world.local_size,
        "device": world.describe(),
        "cuda": torch.version.cuda if world.device.type == "cuda" else None,
        "cpu_cores": psutil.cpu_count(logical=True),
        "memory_bytes": psutil.virtual_memory().total,
    }
