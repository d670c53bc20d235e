"""Hugging Face Accelerate: the loop of its quick tour."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

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


def make_step(job: Job, accelerator: Accelerator) -> Step:
    """Prepare model and optimizer, and return the training step."""
    module = make_network(job)
    model, optimizer = accelerator.prepare(module, make_adamw(module, job))

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()

    return step


def step_contestants(job: Job) -> dict[str, Measure]:
    """Return the loop over batches in memory."""
    return {"Accelerate": timed(make_step(job, Accelerator(cpu=True)))}


def train_from_files(job: Job, laps: Laps) -> None:
    """Train from JPEG files; Accelerate shards the loader."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(image_loader(job, is_sharded=False))
    train_epochs(job, loader, make_step(job, accelerator), laps)


if __name__ == "__main__":
    run_from_files(train_from_files)
