"""Trainings on real ranks that are short of memory at one moment, as the test has it."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import re
import resource
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.step_choices import without_shared_memory
from planning.run_memory import plan_memory
from training.checkpoint.resume import FIRST_START
from training.checkpoint.saver import Saver
from training.config import TrainConfig
from training.observe.run_folder import BATCH_SIZE
from training.parallel.engine import Engine
from training.parallel.native_engine import NativeEngine
from training.parallel.signals import StopRequest
from training.parallel.world import World
from training.run import build_run, train

SETTINGS: dict[str, Any] = {"data": "fake", "model_type": "basic_cnn", "image_size": 16, "epochs": 1}
SETTINGS |= {"progress": "off", "tensorboard": False, "report": False, "workers": "0", "log_every_steps": 3}
FAILING_RANK = 1
M_MMAP_THRESHOLD = -3  # malloc.h


def run_short_of_memory(
    world: World,
    log_dir: str,
    name: str,
    phase: str = "",
    at: int = 0,
    shared: bool = True,
    rate_trial_steps: int = 100,
    **changes: Any,
) -> dict[str, Any]:
    """Train; rank 1 runs out of memory in the `at`-th forward, backward or evaluated batch, from 0, if `phase` is one.

    With the phase "limit" it may take `at` MB of memory from the first step on, by the kernel's limit.

    Returns:
        Exit code, the name of the checkpoint that was saved last, the furthest step of an epoch that was ever saved,
        and the sha256 of the weights that the run has exported.
    """
    config = TrainConfig(**(SETTINGS | {"log_dir": log_dir, "run_name": name} | changes))
    stop = StopRequest()
    short_trials = mock.patch("training.auto_learning_rate.TRIAL_STEPS", rate_trial_steps)
    with short_trials, nullcontext() if shared else without_shared_memory():
        context = build_run(config, world)
    if phase and world.rank == FAILING_RANK:
        SHORTAGES[phase](context.state.engine, at)
    saved, save = list[int](), Saver.save

    def note_and_save(saver: Saver, *arguments: Any) -> None:
        saved.append(context.state.progress.step)
        save(saver, *arguments)

    with mock.patch.object(Saver, "save", note_and_save):
        result: dict[str, Any] = {"code": train(context, stop)}
    result["furthest"] = max(saved)
    _set_soft_limit(resource.RLIM_INFINITY)
    stop.close()
    context.close()
    result["last"] = (context.folder.checkpoints / "last").read_text().strip()
    if context.folder.weights.exists():
        result["weights"] = hashlib.sha256(context.folder.weights.read_bytes()).hexdigest()
    return result


def find_batch_size(
    world: World, log_dir: str, name: str, most: int = 0, limit_mb: int = 0, **changes: Any
) -> dict[str, Any]:
    """Train with `--batch-size auto`, on the first start; rank 1 is short of memory from one micro-batch on.

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
    start = dataclasses.replace(FIRST_START, plan_memory=plan_memory)
    is_short, stop, forward = world.rank == FAILING_RANK, StopRequest(), NativeEngine.forward

    def fail(engine: NativeEngine, images: torch.Tensor) -> torch.Tensor:
        if is_short and most and engine.module.training and len(images) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(engine, images)

    with mock.patch.object(NativeEngine, "forward", fail):
        if is_short and limit_mb:
            by_limit(None, limit_mb)
        context = build_run(config, world, start)
        result: dict[str, Any] = {"code": train(context, stop, start)}
    _set_soft_limit(resource.RLIM_INFINITY)
    stop.close()
    context.close()
    weights = hashlib.sha256(context.folder.weights.read_bytes()).hexdigest()
    found = context.folder.path / BATCH_SIZE
    return result | {"weights": weights, "found": json.loads(found.read_text()) if found.exists() else None}


def in_forward(engine: Engine, at: int) -> None:
    """Raise in place of a forward of training."""
    forward, counter = engine.forward, _Counter(at)

    def fail_once(images: torch.Tensor) -> torch.Tensor:
        if engine.module.training and counter.is_now():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(images)

    engine.forward = fail_once  # type: ignore[method-assign]


def in_backward(engine: Engine, at: int) -> None:
    """Raise when the gradient of one of the middle parameters is there: others' have been sent, or not yet."""
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    counter = _Counter(at)

    def fail_once(_: torch.Tensor) -> None:
        if counter.is_now():
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory")

    trained[len(trained) // 2].register_post_accumulate_grad_hook(fail_once)


def in_evaluation(engine: Engine, at: int) -> None:
    """Raise in place of the forward of a batch that is evaluated."""
    forward, counter = engine.forward, _Counter(at)

    def fail_once(images: torch.Tensor) -> torch.Tensor:
        if not engine.module.training and counter.is_now():
            raise MemoryError
        return forward(images)

    engine.forward = fail_once  # type: ignore[method-assign]


def by_limit(_: Engine | None, at: int) -> None:
    """Let the kernel refuse more than `at` MB beyond what the process has taken.

    The limit counts address space. So that what is freed becomes room again, as under a limit of memory itself,
    malloc(3) maps every tensor of 128 KiB on its own.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    taken = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert taken
    _set_soft_limit(int(taken[1]) * 1024 + at * 10**6)


def in_save(_: Engine, at: int) -> None:
    """Leave nothing but what is reserved from the `at`-th save on, from 0."""
    save, counter = Saver.save, _Counter(at)

    def save_with_nothing_left(saver: Saver, *arguments: Any) -> None:
        if counter.is_now():
            by_limit(None, 0)
        save(saver, *arguments)

    Saver.save = save_with_nothing_left  # type: ignore[method-assign]


def _set_soft_limit(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


SHORTAGES: dict[str, Callable[[Engine, int], None]] = {
    "forward": in_forward,
    "backward": in_backward,
    "evaluation": in_evaluation,
    "limit": by_limit,
    "save": in_save,
}


class _Counter:
    def __init__(self, at: int) -> None:
        self._left = at

    def is_now(self) -> bool:
        self._left -= 1
        return self._left == -1
