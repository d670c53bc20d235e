"""Trainings on real ranks that are short of memory at one moment, as the test has it."""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from zerovision.planning.search import predicted_tensors
from zerovision.training.base.run_folder import BATCH_SIZE
from zerovision.training.config import TrainConfig
from zerovision.training.engines.torch_engine import TorchEngine
from zerovision.training.run import set_up, train
from zerovision.training.steps.carrier import Start
from zerovision.training.world.world import World

SETTINGS: dict[str, Any] = {"data": "fake", "model_type": "basic_cnn", "image_size": 16, "epochs": 1}
SETTINGS |= {"progress": "off", "tensorboard": False, "report": False, "workers": "0", "log_every_steps": 3}
FAILING_RANK = 1
M_MMAP_THRESHOLD = -3  # malloc.h


def run(world: World, log_dir: str, name: str, rate_trial_steps: int = 100, **changes: Any) -> dict[str, Any]:
    """Train; return the exit code, and the sha256 of the weights that the run has exported."""
    config = TrainConfig(**(SETTINGS | {"log_dir": log_dir, "run_name": name} | changes))
    with mock.patch("zerovision.training.auto_learning_rate.TRIAL_STEPS", rate_trial_steps):
        context = set_up(config, world)
    result: dict[str, Any] = {"code": train(context)}
    context.start.stop.close()
    context.close()
    if context.folder.weights.exists():
        result["weights"] = hashlib.sha256(context.folder.weights.read_bytes()).hexdigest()
    return result


def find_batch_size(
    world: World, log_dir: str, name: str, most: int = 0, limit_mb: int = 0, **changes: Any
) -> dict[str, Any]:
    """Train with `--batch-size auto`; rank 1 is short of memory from one micro-batch on.

    Args:
        world: the ranks.
        log_dir: of the run.
        name: of the run.
        most: images with which rank 1 can train, by an injected error; 0 for any number.
        limit_mb: what the kernel gives rank 1 beyond what the process has; 0 for no limit.
        changes: of the configuration.

    Returns:
        Exit code, what the run's folder says of the search, and the sha256 of the exported weights.
    """
    config = TrainConfig(**(SETTINGS | {"log_dir": log_dir, "run_name": name, "batch_size": "auto"} | changes))
    is_short, forward = world.rank == FAILING_RANK, TorchEngine.forward

    def fail(engine: TorchEngine, images: torch.Tensor) -> torch.Tensor:
        if is_short and most and engine.module.training and len(images) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(engine, images)

    with mock.patch.object(TorchEngine, "forward", fail):
        if is_short and limit_mb:
            by_limit(limit_mb)
        context = set_up(config, world, Start(plan_memory=predicted_tensors))
        result: dict[str, Any] = {"code": train(context)}
    _set_soft_limit(resource.RLIM_INFINITY)
    context.start.stop.close()
    context.close()
    weights = hashlib.sha256(context.folder.weights.read_bytes()).hexdigest()
    found = context.folder.path / BATCH_SIZE
    return result | {"weights": weights, "found": json.loads(found.read_text()) if found.exists() else None}


def by_limit(at: int) -> None:
    """Let the kernel refuse more than `at` MB beyond what the process has taken.

    The limit counts address space. So that what is freed becomes room again, as under a limit of memory itself,
    malloc(3) maps every tensor of 128 KiB on its own.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    taken = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert taken
    _set_soft_limit(int(taken[1]) * 1024 + at * 10**6)


def _set_soft_limit(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
