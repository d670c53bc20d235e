"""Hugging Face transformers' Trainer around the same network; logging and checkpoints switched off."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.peers.job import Batches, Job, Laps, Measure, SteadySteps, image_folder, make_network, run_from_files

WARMUP_STEPS = 3


class LossModel(nn.Module):
    """The network with the signature that the Trainer expects."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits [B, classes]."""
        logits = self.network(pixel_values)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Stopwatch(transformers.TrainerCallback):
    """Tells the steps and the epochs to whom they concern."""

    def __init__(self, steps: SteadySteps | None = None, laps: Laps | None = None) -> None:
        self.steps, self.laps = steps, laps

    def on_epoch_begin(self, *_: object, **__: object) -> None:
        """Before the loader's iterator is made."""
        if self.laps:
            self.laps.start()

    def on_step_end(self, *_: object, **__: object) -> None:
        """After the optimizer's step."""
        if self.steps:
            self.steps.after_step()

    def on_epoch_end(self, *_: object, **__: object) -> None:
        """After the epoch's last step."""
        if self.laps:
            self.laps.stop()


class MemoryTrainer(transformers.Trainer):
    """The Trainer over whole batches that lie in memory."""

    def get_train_dataloader(self) -> DataLoader:
        """Return the batches as they are."""
        return DataLoader(self.train_dataset, batch_size=None)


def make_arguments(job: Job, folder: str, epochs: int) -> transformers.TrainingArguments:
    """Return the Trainer's settings; its own choice of AdamW implementation stays."""
    return transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=job.batch_size,
        num_train_epochs=epochs,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=job.weight_decay,
        max_grad_norm=0.0,
        dataloader_num_workers=job.workers,
        dataloader_persistent_workers=job.workers > 0,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def collate(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """Stack the samples of an ImageFolder."""
    images, labels = zip(*samples, strict=True)
    return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}


def step_contestants(job: Job) -> dict[str, Measure]:
    """Return one `train` per measurement over batches in memory, its first steps left out."""
    model = LossModel(make_network(job))

    def measure(batches: Batches) -> float:
        steps = SteadySteps(WARMUP_STEPS)
        rows: list[dict[str, Any]] = [
            {"pixel_values": images, "labels": labels} for images, labels in [*batches[:WARMUP_STEPS], *batches]
        ]
        with tempfile.TemporaryDirectory() as folder:
            settings = make_arguments(job, folder, epochs=1)
            MemoryTrainer(model, settings, train_dataset=rows, callbacks=[Stopwatch(steps=steps)]).train()
        return steps.seconds_per_step()

    return {"transformers Trainer": measure}


def train_from_files(job: Job, laps: Laps) -> None:
    """Train from JPEG files; the Trainer makes and shards the loader."""
    model = LossModel(make_network(job))
    with tempfile.TemporaryDirectory() as folder:
        settings = make_arguments(job, folder, job.epochs)
        trainer = transformers.Trainer(
            model, settings, train_dataset=image_folder(job), data_collator=collate, callbacks=[Stopwatch(laps=laps)]
        )
        trainer.train()


if __name__ == "__main__":
    run_from_files(train_from_files)
