"""Lightning: a LightningModule under its Trainer with the strategy `ddp`; logging and checkpoints switched off."""

from __future__ import annotations

import logging
import warnings

import lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.peers.job import (
    Batches,
    Job,
    Laps,
    Measure,
    SteadySteps,
    image_loader,
    make_adamw,
    make_network,
    run_from_files,
)

WARMUP_STEPS = 3


class Classifier(lightning.LightningModule):
    """The module of Lightning's first example."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.network = job, make_network(job)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return make_adamw(self, self.job)


class Stopwatch(lightning.Callback):
    """Tells the steps and the epochs to whom they concern."""

    def __init__(self, steps: SteadySteps | None = None, laps: Laps | None = None) -> None:
        self.steps, self.laps = steps, laps

    def on_train_epoch_start(self, *_: object) -> None:
        """Before the loader's iterator is made."""
        if self.laps:
            self.laps.start()

    def on_train_batch_end(self, *_: object) -> None:
        """After the optimizer's step."""
        if self.steps:
            self.steps.after_step()

    def on_train_epoch_end(self, *_: object) -> None:
        """After the epoch's last step."""
        if self.laps:
            self.laps.stop()


def make_trainer(stopwatch: Stopwatch, epochs: int, *, is_sharded: bool) -> lightning.Trainer:
    """Return the Trainer, with what costs time beside training switched off."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_epochs=epochs,
        use_distributed_sampler=is_sharded,
        callbacks=[stopwatch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def step_contestants(job: Job) -> dict[str, Measure]:
    """Return one `fit` per measurement over batches in memory, its first steps left out."""
    module = Classifier(job)

    def measure(batches: Batches) -> float:
        steps = SteadySteps(WARMUP_STEPS)
        trainer = make_trainer(Stopwatch(steps=steps), epochs=1, is_sharded=False)
        trainer.fit(module, DataLoader([*batches[:WARMUP_STEPS], *batches], batch_size=None))
        return steps.seconds_per_step()

    return {"Lightning": measure}


def train_from_files(job: Job, laps: Laps) -> None:
    """Train from JPEG files; Lightning shards the loader."""
    trainer = make_trainer(Stopwatch(laps=laps), job.epochs, is_sharded=True)
    trainer.fit(Classifier(job), image_loader(job, is_sharded=False))


if __name__ == "__main__":
    run_from_files(train_from_files)
