"""Computes each pipeline rank's part of a network, for the planner; the network is cut as in `engines.pipeline`.

The trainer balances the measured time of a forward pass, whereas the planner balances the number of operations. Each
uses its own criterion to distribute an ensemble's members, too.
"""

from __future__ import annotations

import dataclasses
import functools

from zerovision.models.activations import Activations, Piece
from zerovision.models.dry_run import forward_flops
from zerovision.models.ensemble import Ensemble
from zerovision.models.sides import sides
from zerovision.planning.memory import RankShare
from zerovision.planning.run_workload import Workload, sizes_of
from zerovision.training.config import TrainConfig
from zerovision.training.engines.buckets import deal
from zerovision.training.engines.pipeline import stages_per_rank
from zerovision.training.engines.pipeline.cuts import cuts_for, names_of_stages, places_for, trace


@functools.lru_cache(maxsize=64)
def stages_of(workload: Workload, config: TrainConfig, precision: str, device: str) -> tuple[RankShare, ...]:
    """Cut a network into stages; return each rank's part.

    Args:
        workload: the whole network.
        config: configuration with the micro-batch, accumulation, activation checkpointing and pipeline.
        precision: 'fp32', 'bf16' or 'fp16'.
        device: 'cpu' or 'cuda'.

    Raises:
        UserError: if the network cannot be cut as requested.
    """
    if isinstance(workload.network, Ensemble):
        return _members_of(workload, workload.network, config, precision, device)
    ranks, size, recomputes = config.pipeline_parallel, workload.image_size, config.activation_checkpointing
    count = ranks * stages_per_rank(config.pipeline_schedule)
    network = workload.without_data(recomputes=recomputes)
    traced = trace(network, (config.micro_batch, workload.image_channels, *sides(size)))
    places = places_for(traced, count, ranks)
    found = workload.activations(config.micro_batch, precision, device, recomputes, True, tuple(places))
    flops = forward_flops(workload.without_data(recomputes=False), places, size, workload.image_channels)
    cuts = cuts_for(traced, config.pipeline_split, flops, count)
    stage_of = [traced.stage_at(place, cuts) for place in ("", *places)]
    tensors = [name for name, _ in (*network.named_parameters(), *network.named_buffers())]
    names, shares = names_of_stages(traced, tensors, cuts), []
    for rank in range(ranks):
        own = range(rank, count, ranks)
        stages = [[piece for piece, at in zip(found.pieces, stage_of, strict=True) if at == stage] for stage in own]
        held = _held(stages, _under_way(config, rank))
        sizes = sizes_of(network, {name for stage in own for name in names[stage]})
        shares.append(RankShare(sizes, held, workload.whole_bytes + (0 if rank else found.saved + found.workspace)))
    return tuple(shares)


def _members_of(
    workload: Workload, ensemble: Ensemble, config: TrainConfig, precision: str, device: str
) -> tuple[RankShare, ...]:
    """Distribute an ensemble's members over the ranks; see `stages_of` for the other arguments."""
    settings = (config.micro_batch, precision, device, config.activation_checkpointing, True)
    costs = []
    for member in ensemble.members:
        alone = dataclasses.replace(workload, network=member).without_data(recomputes=False)
        costs.append(sum(forward_flops(alone, (), workload.image_size, workload.image_channels)))
    shares = []
    for own in map(sorted, deal(dict(enumerate(costs)), config.pipeline_parallel)):
        part = dataclasses.replace(workload, network=Ensemble(ensemble.members[number] for number in own))
        shares.append(RankShare(sizes_of(part.network), part.activations(*settings), workload.whole_bytes))
    return tuple(shares)


def _under_way(config: TrainConfig, rank: int) -> int:
    """Return the largest number of micro-batches whose activations a rank keeps, counted once per stage.

    See Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473), section 2.2.
    """
    steps, ranks = config.gradient_accumulation_steps, config.pipeline_parallel
    if config.pipeline_schedule == "interleaved":
        return min(2 * steps, 2 * (ranks - rank - 1) + ranks + 1)
    return min(steps, ranks - rank)


def _held(stages: list[list[Piece]], under_way: int) -> Activations:
    """Return the activations of a rank, counting a stage's input twice: as received, and in its new layout."""
    kept = sum(sum(piece.saved for piece in stage) + 2 * stage[0].entered for stage in stages)
    workspace = 0
    for stage in stages:
        later = 0
        for piece in reversed(stage):
            workspace = max(workspace, piece.workspace - later)
            later += piece.saved
    return Activations(round(under_way * kept / len(stages)), ((workspace, 0),))
