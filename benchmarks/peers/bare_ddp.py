"""PyTorch alone: DistributedDataParallel as it comes, and with every option that makes it faster; and without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.job import (
    Job,
    Laps,
    Measure,
    Step,
    image_loader,
    make_adamw,
    make_network,
    mean_cross_entropy,
    run_from_files,
    timed,
    train_epochs,
)

BASELINE, TUNED, FLOOR = "bare DDP", "tuned DDP", "forward and backward alone"
# Every option that makes it faster, beside fused AdamW and channels_last.
TUNED_OPTIONS = {"gradient_as_bucket_view": True, "static_graph": True, "broadcast_buffers": False}


def ddp_step(module: nn.Module, job: Job, *, fused: bool = False, channels_last: bool = False, **options: bool) -> Step:
    """The loop that everybody writes first, around DistributedDataParallel with `options`."""
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
    parallel = DistributedDataParallel(module, **options)
    optimizer = make_adamw(parallel, job, fused=fused)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        mean_cross_entropy(parallel(images), labels).backward()
        if job.gradient_clipping:
            nn.utils.clip_grad_norm_(parallel.parameters(), job.gradient_clipping)
        optimizer.step()

    return step


def forward_backward_step(module: nn.Module, job: Job) -> Step:
    """What no step can leave out, in channels_last: neither the ranks' exchange nor the optimizer."""
    module = module.to(memory_format=torch.channels_last)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        images = images.contiguous(memory_format=torch.channels_last)
        module.zero_grad()
        mean_cross_entropy(module(images), labels).backward()

    return step


VARIANTS: dict[str, Callable[[nn.Module, Job], Step]] = {
    BASELINE: ddp_step,
    TUNED: partial(ddp_step, fused=True, channels_last=True, **TUNED_OPTIONS),
    FLOOR: forward_backward_step,
}


def step_contestants(job: Job) -> dict[str, Measure]:
    """Return all three over batches in memory."""
    return {name: timed(make_step(make_network(job), job)) for name, make_step in VARIANTS.items()}


def train_from_files(job: Job, laps: Laps) -> None:
    """Train from JPEG files."""
    train_epochs(job, image_loader(job), VARIANTS[job.variant](make_network(job), job), laps)


if __name__ == "__main__":
    run_from_files(train_from_files)
