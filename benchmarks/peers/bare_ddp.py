"""PyTorch alone: DistributedDataParallel as it comes, and with every option that makes it faster."""

from __future__ import annotations

from collections.abc import Callable

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
    run_from_files,
    timed,
    train_epochs,
)


def default_step(job: Job) -> Step:
    """The loop that everybody writes first."""
    parallel = DistributedDataParallel(make_network(job))
    optimizer = make_adamw(parallel, job)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(images), labels).backward()
        optimizer.step()

    return step


def tuned_step(job: Job) -> Step:
    """The same with bucket views, a static graph, no buffer broadcast, fused AdamW, channels_last throughout."""
    module = make_network(job).to(memory_format=torch.channels_last)
    parallel = DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)
    optimizer = make_adamw(parallel, job, fused=True)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        images = images.contiguous(memory_format=torch.channels_last)
        nn.functional.cross_entropy(parallel(images), labels).backward()
        optimizer.step()

    return step


VARIANTS: dict[str, Callable[[Job], Step]] = {"bare DDP": default_step, "bare DDP tuned": tuned_step}


def step_contestants(job: Job) -> dict[str, Measure]:
    """Return both loops over batches in memory."""
    return {name: timed(make_step(job)) for name, make_step in VARIANTS.items()}


def train_from_files(job: Job, laps: Laps) -> None:
    """Train from JPEG files."""
    train_epochs(job, image_loader(job), VARIANTS[job.variant](job), laps)


if __name__ == "__main__":
    run_from_files(train_from_files)
