"""What tests/training/test_exchange.py runs in each rank: ranks that count as those of several machines."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.training.engine_ranks import train_leaves
from zerovision.training.engines import tree_reduce_scatter as levels
from zerovision.training.world.world import World


class Sent:
    """Counts the bytes of gradients that a rank sends to other ranks and to other machines.

    Args:
        world: the ranks.
        per_machine: neighbours that count as one machine.
    """

    def __init__(self, world: World, per_machine: int) -> None:
        self._world, self._per_machine, self._send = world, per_machine, dist.all_to_all_single
        self._gather = dist.all_gather_into_tensor
        self.to_ranks = self.to_machines = 0

    def all_to_all_single(self, output: torch.Tensor, given: torch.Tensor, *args: Any, **options: Any) -> Any:
        """As PyTorch's."""
        group = options.get("group")
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        bytes_ = given.nbytes // len(ranks)
        self.to_ranks += bytes_ * sum(rank != self._world.rank for rank in ranks)
        own = self._world.rank // self._per_machine
        self.to_machines += bytes_ * sum(rank // self._per_machine != own for rank in ranks)
        return self._send(output, given, *args, **options)

    def all_gather_into_tensor(self, output: torch.Tensor, given: torch.Tensor, *args: Any, **options: Any) -> Any:
        """As PyTorch's; of a group of one rank of each machine, it hands over sums, in a ring."""
        ranks = dist.get_process_group_ranks(options.get("group") or dist.group.WORLD)
        if len({rank // self._per_machine for rank in ranks}) == len(ranks):
            self.to_machines += given.nbytes * (len(ranks) - 1)
        return self._gather(output, given, *args, **options)


def train(world: World, per_machine: int, is_two_level: bool, leaves: int, **changes: str) -> dict[str, Any]:
    """Train three steps on machines of so many ranks; return the digest of all state and what was sent.

    Args:
        world: the ranks.
        per_machine: neighbours that count as one machine.
        is_two_level: whether gradients are added inside a machine first.
        leaves: of a step.
        changes: of the configuration.
    """
    rank = world.rank % per_machine
    world = dataclasses.replace(world, local_size=per_machine, local_rank=rank)
    sent = Sent(world, per_machine)
    with (
        mock.patch.object(dist, "all_to_all_single", sent.all_to_all_single),
        mock.patch.object(dist, "all_gather_into_tensor", sent.all_gather_into_tensor),
        mock.patch.object(levels, "MachineLevels", levels.MachineLevels if is_two_level else none),
    ):
        digest, updated = train_leaves(world, leaves, **changes)
    return {"digest": digest, "to_machines": sent.to_machines, "to_ranks": sent.to_ranks, "updated": updated}


def none(_: World) -> None:
    """Take the place of the levels."""
