"""timm's own training style: its loader with prefetcher, its optimizer factory and loss, in the order of its train.py.

train.py itself is no part of the installed package, and stops on CPU ranks; what it costs beside these parts
(logging, meters, checkpoints) is left out here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.job import Job, Laps, Measure, Step, make_network, run_from_files, timed, train_epochs


def make_step(job: Job) -> Step:
    """Return the step of timm's `train_one_epoch`."""
    model = DistributedDataParallel(make_network(job))
    optimizer = create_optimizer_v2(model, opt="adamw", lr=job.learning_rate, weight_decay=job.weight_decay)
    loss_of = nn.CrossEntropyLoss()

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_contestants(job: Job) -> dict[str, Measure]:
    """Return the loop over batches in memory."""
    return {"timm loop": timed(make_step(job))}


def train_from_files(job: Job, laps: Laps) -> None:
    """Train from JPEG files through timm's dataset and loader."""
    loader = create_loader(
        create_dataset("", root=str(Path(job.data) / "train"), is_training=True),
        input_size=(3, job.image_size, job.image_size),
        batch_size=job.batch_size,
        is_training=True,
        color_jitter=0.0,
        interpolation="bilinear",
        num_workers=job.workers,
        persistent_workers=job.workers > 0,
        distributed=True,
        device=torch.device("cpu"),
    )
    train_epochs(job, loader, make_step(job), laps)


if __name__ == "__main__":
    run_from_files(train_from_files)
