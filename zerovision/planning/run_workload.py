"""The workload of a run, for the planner: sizes of its network and of each stage, computed without data or weights.

The trainer balances the measured time of a forward pass, whereas the planner balances the number of operations. Each
uses its own criterion to distribute an ensemble's members, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zerovision.models import ImageSize, sides
from zerovision.models.activations import Activations, Piece, activations
from zerovision.models.build import build_model
from zerovision.models.dry_run import forward_flops, without_data
from zerovision.models.ensemble import Ensemble
from zerovision.planning.memory import FLOAT32_BYTES, ModelSizes, RankShare
from zerovision.training.base.errors import UserError
from zerovision.training.config import TrainConfig
from zerovision.training.engines.activation_checkpointing import enable_activation_checkpointing, repeated_blocks
from zerovision.training.engines.buckets import deal
from zerovision.training.engines.pipeline import stages_per_rank
from zerovision.training.engines.pipeline.stages import cuts_for, names_of_stages, places_for, trace
from zerovision.training.engines.settings import TORCH, ways_of
from zerovision.training.recipe.optimizer import build_optimizer, create_state
from zerovision.training.recipe.tuning import tune


@dataclass(frozen=True)
class Workload:
    """A network, and one rank's work on it in a micro-step."""

    network: nn.Module  # on the meta device; not modified
    image_size: ImageSize  # of the training images, in pixels
    image_channels: int
    sizes: ModelSizes
    optimizer_values: float  # kept per trained parameter by the update rule and weight averages
    whole_bytes: int  # weights and buffers of the whole network, which a rank keeps until it is divided

    @property
    def saved_bytes(self) -> int:
        """Size in bytes of the weights file and one checkpoint, without buffers."""
        return FLOAT32_BYTES * (self.sizes.parameters + round(self.sizes.trained * (1 + self.optimizer_values)))

    @property
    def has_batchnorm(self) -> bool:
        """Whether any layer normalizes over the images of a micro-batch."""
        return any(isinstance(part, _BatchNorm) for part in self.network.modules())

    @property
    def image_bytes(self) -> int:
        """Size of an image in bytes, in fp32."""
        return FLOAT32_BYTES * self.image_channels * math.prod(sides(self.image_size))

    @lru_cache(maxsize=64)  # noqa: B019  # keeps the workload alive, but a command has only one
    def activations(
        self,
        batch_size: int,
        precision: str,
        device: str,
        checkpointing: bool,
        channels_last: bool,
        places: tuple[str, ...] = (),
    ) -> Activations:
        """Return a micro-batch's activations on this rank, or raise a UserError if the network needs real images."""
        network = self.without_data(recomputes=checkpointing)
        shape = (batch_size, self.image_channels, *sides(self.image_size))
        try:
            return activations(network, shape, precision, device, channels_last=channels_last, places=places)
        except Exception as error:  # a user's timm model may process its data in any way
            raise UserError("this model's work depends on its images' values, so it cannot be planned.") from error

    def without_data(self, *, recomputes: bool) -> nn.Module:
        """Return a copy of the network on the meta device, with training's activation checkpointing if `recomputes`."""
        network = without_data(self.network)
        if recomputes:
            enable_activation_checkpointing(network)
        return network


def build_network(config: TrainConfig, classes: int, image_size: ImageSize) -> nn.Module:
    """Build a run's network in training mode, with random weights on PyTorch's default device, or raise a UserError."""
    built = build_model(config, classes, image_size, config.image_channels or 3, loads_weights=False)
    return tune(built, config.tune).module.train()


def optimizer_of(network: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Build a run's optimizer, with an arbitrary learning rate if none has been chosen yet."""
    if config.learning_rate == "auto":
        config = dataclasses.replace(config, learning_rate=config.default_rate)
    return build_optimizer(network, config, (), discriminative=False)


def workload_of(config: TrainConfig, classes: int, image_size: ImageSize) -> Workload:
    """Return the workload of a run's network, or of one rank's part of it.

    Args:
        config: settings of the model, the image channels, the optimizer and the weight averages.
        classes: number of classes.
        image_size: size of the training images in pixels.

    Raises:
        UserError: if the network cannot be built for these images.
    """
    channels = config.image_channels or 3
    with torch.device("meta"):
        network = build_network(config, classes, image_size)
    whole_bytes = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    ways = ways_of(config, TORCH)
    for way in ways:
        way.take_largest_part(network)
    optimizer = optimizer_of(network, config)
    create_state(optimizer, [parameter for parameter in network.parameters() if parameter.requires_grad])
    states = [value for state in optimizer.state.values() for value in state.values()]
    kept = sum(value.numel() for value in states if isinstance(value, torch.Tensor) and value.ndim > 0)
    sizes = sizes_of(network)
    values = kept / sizes.trained + bool(config.ema) + bool(config.lookahead) + sum(way.kept_values() for way in ways)
    return Workload(network, image_size, channels, sizes, values, whole_bytes)


def sizes_of(network: nn.Module, names: Collection[str] | None = None) -> ModelSizes:
    """Return the sizes that determine a network's memory, or only the sizes of the named parameters and buffers."""

    def is_counted(name: str) -> bool:
        return names is None or name in names

    parameters = [parameter for name, parameter in network.named_parameters() if is_counted(name)]
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in parameters]
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in repeated_blocks(network)]
    total, largest = sum(count for count, _ in counts), max(blocks, default=0)
    neighbours = (*itertools.pairwise(blocks), *itertools.pairwise(blocks[::-1]))
    return ModelSizes(
        parameters=total,
        trained=sum(count for count, trained in counts if trained),
        largest_parameter=max((count for count, _ in counts), default=0),
        largest_block=largest,
        next_block=max((other for one, other in neighbours if one == largest), default=0),
        outside=total - sum(blocks),
        buffer_bytes=sum(buffer.nbytes for name, buffer in network.named_buffers() if is_counted(name)),
    )


@lru_cache(maxsize=64)
def stages_of(workload: Workload, config: TrainConfig, precision: str, device: str) -> tuple[RankShare, ...]:
    """Cut a network into stages for 'fp32', 'bf16' or 'fp16' on 'cpu' or 'cuda'; return each rank's part.

    Raise a UserError if the network cannot be cut as requested.
    """
    if isinstance(workload.network, Ensemble):
        return _members_of(workload, workload.network, config, precision, device)
    ranks, size, recomputes = config.pipeline_parallel, workload.image_size, config.activation_checkpointing
    count = ranks * stages_per_rank(config.pipeline_schedule)
    network = workload.without_data(recomputes=recomputes)
    traced = trace(network, (config.micro_batch, workload.image_channels, *sides(size)))
    places = places_for(traced, count, ranks)
    found = workload.activations(config.micro_batch, precision, device, recomputes, True, tuple(places))
    flops = partial(forward_flops, workload.without_data(recomputes=False), places, size, workload.image_channels)
    cuts = cuts_for(traced, config.pipeline_split, flops, count)
    stage_of = [traced.stage_at(place, cuts) for place in ("", *places)]
    tensors = [name for name, _ in (*network.named_parameters(), *network.named_buffers())]
    names, shares = names_of_stages(traced, tensors, cuts), []
    for rank in range(ranks):
        own = range(rank, count, ranks)
        stages = [[piece for piece, at in zip(found.pieces, stage_of, strict=True) if at == stage] for stage in own]
        held = _held(stages, config, rank)
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


def _held(stages: list[list[Piece]], config: TrainConfig, rank: int) -> Activations:
    """Return the activations of a rank, counting a stage's input twice: as received, and in its new layout."""
    # The largest number of micro-batches whose activations the rank keeps, counted once per stage: Narayanan et al.
    # 2021 (https://arxiv.org/abs/2104.04473), section 2.2.
    steps, ranks = config.gradient_accumulation_steps, config.pipeline_parallel
    under_way = min(steps, ranks - rank)
    if config.pipeline_schedule == "interleaved":
        under_way = min(2 * steps, 2 * (ranks - rank - 1) + ranks + 1)
    kept = sum(sum(piece.saved for piece in stage) + 2 * stage[0].entered for stage in stages)
    workspace = 0
    for stage in stages:
        later = 0
        for piece in reversed(stage):
            workspace = max(workspace, piece.workspace - later)
            later += piece.saved
    return Activations(round(under_way * kept / len(stages)), ((workspace, 0),))
