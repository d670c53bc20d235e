"""A preset for each GPU: the planner finds that its batch fits, and that twice as many images would not."""

from __future__ import annotations

import dataclasses

import pytest

from planning.machines import GPUS, find_machine
from planning.search import PlannedJob, evaluate
from training.command_line import parse_args
from training.config import TrainConfig
from training.model_fields import PRESETS

LARGEST_BATCH = 256
LARGEST_MODEL = TrainConfig(model_type="ensemble")  # of the guide's; the others need less


def test_every_gpu_has_a_preset():
    assert set(GPUS) <= set(PRESETS)


@pytest.mark.parametrize("names", [["h100-80gb"], pytest.param([*GPUS], marks=pytest.mark.slow)], ids=["one", "all"])
def test_the_largest_batch_that_fits(names):
    """All in one test: what a batch size takes is counted once in a process, which takes seconds."""
    first = PlannedJob(LARGEST_MODEL, find_machine("h100-80gb", 1), ranks=1, classes=1000, image_size=224, images=10**6)

    def fits(name: str, batch_size: int) -> bool:
        job = dataclasses.replace(first, machine=find_machine(name, 1))
        job.__dict__["workload"] = first.workload
        return evaluate(job, dataclasses.replace(LARGEST_MODEL, batch_size=batch_size)).fits

    for name in names:
        config, _ = parse_args(["--preset", name])
        assert (config.strategy, config.image_size) == ("ddp", 224), name
        assert fits(name, config.batch_size), name
        assert config.batch_size == LARGEST_BATCH or not fits(name, 2 * config.batch_size), name
