"""Trainings on real ranks with `--log-hashes 1`, one of which computes one bit wrong in one step."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from unittest import mock

import torch

from tests.training.out_of_memory_ranks import SETTINGS
from zerovision.training.config import TrainConfig
from zerovision.training.engines import buckets
from zerovision.training.run import set_up, train
from zerovision.training.world.world import World


def few_elements() -> AbstractContextManager[int]:
    """Set what a norm's last bits depend on, and other tests change."""
    return mock.patch.object(buckets, "FEWEST_ELEMENTS", 256)


def run(world: World, log_dir: str, name: str, wrong: str = "", rank: int = 0, step: int = 0, leaves: int = 1) -> int:
    """Train five steps of four leaves; of `wrong`, "outputs" or "gradients", a rank gets a bit wrong in a step."""
    changes = {"batch_size": 50, "gradient_accumulation_steps": leaves, "log_dir": log_dir, "run_name": name}
    config = TrainConfig(**(SETTINGS | changes | {"log_hashes": 1, "threads_per_rank": 1}))
    with few_elements():
        context = set_up(config, world)
    module, calls = context.state.engine.module, itertools.count(1)

    def flip(values: torch.Tensor) -> torch.Tensor:
        if not module.training or next(calls) != step * leaves:  # the last leaf of the step
            return values
        wrong = values.detach().clone(memory_format=torch.contiguous_format)
        wrong.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
        return values + (wrong - values).detach()

    if world.rank == rank and wrong == "outputs":
        module.register_forward_hook(lambda *given: flip(given[-1]))
    if world.rank == rank and wrong == "gradients":
        next(module.parameters()).register_hook(flip)
    exit_code = train(context)
    context.start.stop.close()
    context.close()
    return exit_code
