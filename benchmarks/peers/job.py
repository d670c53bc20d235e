"""What every contestant of `make bench` is given, and how all are timed; each `peers/<name>.py` is one contestant.

A module that takes part has `step_contestants(job)`, which returns by name a function from batches in memory to
seconds per step, and a `main` that hands `train_from_files` to `run_from_files`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from zerovision.models.build import build_model
from zerovision.training.base.settings import RunSettings

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Batches = list[tuple[torch.Tensor, torch.Tensor]]
"""(float32 [B, 3, S, S], int64 [B]) of one rank, in memory."""
Step = Callable[[torch.Tensor, torch.Tensor], None]
Measure = Callable[[Batches], float]


@dataclass(frozen=True)
class Job:
    """The work, the same for all: model, optimizer and data; fp32.

    Attributes:
        model_type: a name of `models.MODELS`.
        batch_size: images per rank.
        image_size: pixels.
        learning_rate: AdamW's, constant.
        weight_decay: AdamW's.
        gradient_clipping: largest norm of the gradient, 0 for none; only bare DDP and our engines read it.
        data: folder with train/CLASS/FILE.jpg; '' for steps from memory.
        workers: loader processes per rank.
        epochs: epochs from files.
        variant: which of the module's contestants trains from files; '' for its only one.
    """

    model_type: str = "mobilenet"
    batch_size: int = 16
    image_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    gradient_clipping: float = 0.0
    data: str = ""
    workers: int = 0
    epochs: int = 2
    variant: str = ""


NUM_CLASSES = 10


def write_job(job: Job) -> str:
    """Return a job as a word of a command line."""
    return json.dumps(dataclasses.asdict(job))


def read_job(word: str) -> Job:
    """Return the job of such a word."""
    return Job(**json.loads(word))


def make_network(job: Job) -> nn.Module:
    """Build the network, with the same weights for every contestant."""
    torch.manual_seed(0)
    return build_model(RunSettings(model_type=job.model_type), NUM_CLASSES, job.image_size).module


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return PyTorch's mean loss of logits [B, C], or over each member of an ensemble of [B, C, members]."""
    targets = labels if logits.ndim == 2 else labels[:, None].expand(-1, logits.shape[2])
    return nn.functional.cross_entropy(logits, targets)


def make_adamw(module: nn.Module, job: Job, **settings: bool) -> torch.optim.AdamW:
    """AdamW as PyTorch makes it when nothing more is said."""
    return torch.optim.AdamW(module.parameters(), lr=job.learning_rate, weight_decay=job.weight_decay, **settings)


def image_folder(job: Job) -> ImageFolder:
    """Open the files as torchvision's examples do: Pillow, random crop, flip, normalized float32."""
    augment = [transforms.RandomResizedCrop(job.image_size), transforms.RandomHorizontalFlip()]
    tensor = [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    return ImageFolder(str(Path(job.data) / "train"), transforms.Compose([*augment, *tensor]))


def image_loader(job: Job, *, is_sharded: bool = True) -> DataLoader:
    """Return the loader over the files; `is_sharded` gives each rank its part, where no library does that itself."""
    files = image_folder(job)
    sampler = DistributedSampler(files) if is_sharded else None
    return DataLoader(
        files,
        batch_size=job.batch_size,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=job.workers,
        persistent_workers=job.workers > 0,
    )


class Laps:
    """Seconds of each epoch, from the request of its first batch until all ranks have done its last step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def start(self) -> None:
        """An epoch begins; a collective."""
        dist.barrier()
        self._start = time.perf_counter()

    def stop(self) -> None:
        """An epoch has ended; a collective."""
        dist.barrier()
        self.seconds.append(time.perf_counter() - self._start)


def train_epochs(job: Job, loader: DataLoader, step: Step, laps: Laps) -> None:
    """The loop that everybody writes first."""
    for epoch in range(job.epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        laps.start()
        for images, labels in loader:
            step(images, labels)
        laps.stop()


def make_batches(job: Job, steps: int, seed: int | None = None) -> Batches:
    """Random images, of a seed, or without one others on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    size = (job.batch_size, 3, job.image_size, job.image_size)
    return [
        (torch.randn(size, generator=generator), torch.randint(NUM_CLASSES, (job.batch_size,), generator=generator))
        for _ in range(steps)
    ]


def timed(step: Step) -> Measure:
    """Time a step function over batches in memory; the ranks start and end together."""

    def measure(batches: Batches) -> float:
        dist.barrier()
        start = time.perf_counter()
        for images, labels in batches:
            step(images, labels)
        dist.barrier()
        return (time.perf_counter() - start) / len(batches)

    return measure


def take_turns(measures: Mapping[str, Measure], batches: Batches, rounds: int) -> list[dict[str, float]]:
    """Measure everyone once per round, in shuffled order; return the rounds after a first one that only warms up."""
    order, shuffler, seconds = list(measures), random.Random(0), []
    for _ in range(rounds + 1):
        shuffler.shuffle(order)  # the same on all ranks
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            taken = {name: measures[name](batches) for name in order}
        seconds.append({name: taken[name] for name in measures})
    return seconds[1:]


class SteadySteps:
    """Seconds per step of a library that owns its loop: what its callback says after each step, warm-up left out."""

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps = warmup_steps
        self._times: list[float] = []

    def after_step(self) -> None:
        """A step has ended on this rank; the gradients' reduction keeps the ranks together."""
        self._times.append(time.perf_counter())

    def seconds_per_step(self) -> float:
        """Return the mean from the last warm-up step's end to the last step's end."""
        first = self._warmup_steps - 1
        return (self._times[-1] - self._times[first]) / (len(self._times) - 1 - first)


def run_from_files(train_from_files: Callable[[Job, Laps], None]) -> None:
    """Be one rank of one contestant: read the job, train, and write the seconds on rank 0."""
    parser = argparse.ArgumentParser(description="One contestant of `make bench`, under torchrun.")
    parser.add_argument("--result", type=Path, required=True, help="gets [[seconds of each epoch] of each --workers]")
    parser.add_argument("--workers", default="0", help="comma-separated: one training for each number")
    parser.add_argument("--job", type=read_job, required=True, help="as `write_job` returns it")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    seconds = []
    for workers in given.workers.split(","):
        laps = Laps()
        train_from_files(dataclasses.replace(given.job, workers=int(workers)), laps)
        seconds.append(laps.seconds)
    if dist.get_rank() == 0:
        given.result.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()
