"""DeepSpeed alone: ZeRO 1, 2 and 3 with the configuration's defaults, clipping apart (its default is 1.0)."""

from __future__ import annotations

import logging
import os

import torch
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

STAGES = {"bare ZeRO-1": 1, "bare ZeRO-2": 2, "bare ZeRO-3": 3}


def zero_step(job: Job, stage: int) -> Step:
    """DeepSpeed's getting-started loop."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # A helper for inference, compiled at the first start; leaving it out costs the training nothing.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    module = make_network(job)
    config = {
        "train_micro_batch_size_per_gpu": job.batch_size,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, _, _, _ = deepspeed.initialize(model=module, optimizer=make_adamw(module, job), config=config)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        engine.backward(nn.functional.cross_entropy(engine(images), labels))
        engine.step()

    return step


def step_contestants(job: Job) -> dict[str, Measure]:
    """Return the three stages over batches in memory."""
    return {name: timed(zero_step(job, stage)) for name, stage in STAGES.items()}


def train_from_files(job: Job, laps: Laps) -> None:
    """Train from JPEG files."""
    train_epochs(job, image_loader(job), zero_step(job, STAGES[job.variant]), laps)


if __name__ == "__main__":
    run_from_files(train_from_files)
