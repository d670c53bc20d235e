"""PyTorch's engine with the members of an ensemble on separate ranks, which all process the same images.

Members are independent, so the ranks compute them at the same time, and then exchange logits. Every rank computes the
loss over all members, and runs backward through its own members. Gradients and their norm are added along the same tree
as on a single rank, so the weights are bit-identical.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from zerovision.models.ensemble import Ensemble
from zerovision.training.engines.buckets import deal
from zerovision.training.engines.engine import EngineSetup
from zerovision.training.engines.pipeline.engine import release
from zerovision.training.engines.pipeline.rehearsal import images_to_try, measure_pieces
from zerovision.training.engines.precision import under_autocast
from zerovision.training.engines.torch_engine import TorchEngine
from zerovision.training.world.collectives import gather_rows


class MembersEngine(TorchEngine):
    """An ensemble that has some of its members on this rank."""

    def __init__(self, setup: EngineSetup, config: Any) -> None:
        """Assign each member to one rank, and distribute each rank's members.

        This is a collective.
        """
        assert isinstance(setup.module, Ensemble)
        module, world = setup.module, setup.world
        self._pipeline = world.dimension("pipeline_parallel")
        labels = config.ensemble_members.split(",")
        names = [f"members.{number}" for number in range(len(module.members))]
        network = under_autocast(module, setup.precision, world.device)
        seconds = measure_pieces(network, module, names[1:], images_to_try(setup), world)
        self._dealt = [sorted(own) for own in deal(dict(enumerate(seconds)), self._pipeline.size)]
        loads = [sum(seconds[number] for number in members) for members in self._dealt]
        shares, waits = [load / sum(loads) for load in loads], 1 - sum(loads) / len(loads) / max(loads)
        had = [", ".join(labels[number] for number in members) for members in self._dealt]
        setup.notes.append(
            f"ensemble on {len(loads)} ranks: they have the members {' | '.join(had)}, which take "
            f"{', '.join(f'{share:.0%}' for share in shares)} of a forward pass; a rank waits for {waits:.0%} of a step"
        )
        setup.events["pipeline"] = {"members": had, "stage_shares": shares, "wait_share": waits}
        tensors = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        module.own, module.gather = self._dealt[self._pipeline.rank], self._gather
        own = [name for name in tensors if name.startswith(tuple(f"{names[number]}." for number in module.own))]
        release(module, setup.optimizer, {*own})
        part = dataclasses.replace(setup.part, stages=[own], holders=self._pipeline)
        super().__init__(dataclasses.replace(setup, part=part))

    def _gather(self, answers: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return all members' logits, each float32 [B, classes], given the logits of this rank's members; a collective.

        Autograd treats the other ranks' logits as constants.
        """
        most, shape = max(map(len, self._dealt)), answers[0].shape
        row = answers[0].new_zeros(most, *shape)
        row[: len(answers)] = torch.stack(answers).detach()
        rows = gather_rows(row.view(-1), self._pipeline).view(-1, most, *shape)
        found = {number: rows[rank, place] for rank, own in enumerate(self._dealt) for place, number in enumerate(own)}
        found |= zip(self._dealt[self._pipeline.rank], answers, strict=True)
        return [found[number] for number in range(len(found))]
