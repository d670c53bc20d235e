"""What a process on pretended GPUs does for a test."""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import set_fused_attn

from benchmarks.gpu.contestants import make_network, our_contestant, timm_contestant
from tests.gpu.pretended.faults import FAULTS
from tests.gpu.pretended.garbage import replace
from tests.gpu.pretended.watch import Watch, launches
from zerovision.commands import train_distributed
from zerovision.training.config.command_line import run_script
from zerovision.training.observe.observer import Observers
from zerovision.training.world.world import start_world

# One short epoch of 20 steps, without what has nothing to do with a step.
FLAGS = "--epochs 1 --data digits --log-every-steps 1000 --tensorboard false --report false"
IMAGE_SIZE, BATCH_SIZE, CLASSES, WARM_UP, STEPS = 64, 2, 1000, 2, 3  # of bare steps


def train(flags: str, fault: str = "") -> dict[str, Any]:
    """Train as one rank by the command line, with a fault planted; return what was seen, and the exit code."""
    if fault:
        FAULTS[fault]()
    watch = Watch()
    watch.start()
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [train_distributed.__file__, *FLAGS.split(), "--log-dir", folder, *flags.split()]
        exit_code = run_script("error", list, train_distributed.train)
    return watch.report() | {"exit_code": exit_code}


class _SeenEnough(BaseException):
    """Ends a training in the midst of an epoch."""


def memory(flags: str) -> dict[str, int]:
    """Train a few steps as one rank; return the most bytes of the GPU that were in use before the first, and after."""
    peaks, steps = [], itertools.count()
    set_fused_attn(enable=False)  # whose kernels are not there

    def noting(before_step: Any) -> Any:
        def noted(observers: Any, position: int) -> None:
            if (step := next(steps)) in (0, WARM_UP):
                peaks.append(torch.cuda.max_memory_allocated())
                torch.cuda.reset_peak_memory_stats()
            if step == WARM_UP:
                raise _SeenEnough
            before_step(observers, position)

        return noted

    replace(Observers, "before_step", noting)
    with contextlib.suppress(_SeenEnough):
        train(flags)
    return {"starting": peaks[0], "training": peaks[1]}


def bare_step(model_type: str) -> dict[str, int]:
    """Return the kernels of a bare step under ddp: of timm's loop, and of our engine without CUDA graphs and with."""
    world, kernels = start_world(), {}
    images = torch.zeros(BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE, device=world.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(BATCH_SIZE, dtype=torch.int64, device=world.device)
    eager = partial(our_contestant, graphs=False)
    for name, make in {"timm": timm_contestant, "ours": eager, "recorded": our_contestant}.items():
        contestant = make(make_network(model_type, IMAGE_SIZE, CLASSES, BATCH_SIZE), world, BATCH_SIZE, IMAGE_SIZE)
        for _ in range(WARM_UP):
            contestant.step(images, labels)
        before = launches()
        for _ in range(STEPS):
            contestant.step(images, labels)
        kernels[name] = (launches() - before) // STEPS
        contestant.close()
    return kernels


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"train": train, "memory": memory, "bare_step": bare_step}
