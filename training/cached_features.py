"""`--features cached`: what the head reads of each image, computed once by the network before it, which is frozen.

Without augmentation an image is the same in every epoch, and so is what a frozen network makes of it. Each image goes
through it once, in the batches of an evaluation; from then on batches have features in the place of images. They have
the batch size of the training, on which the last bit of a kernel's sums may depend.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from training.base.errors import AgreedError
from training.base.units import format_duration
from training.data.loader import Batch, Loader
from training.data.sampler import BatchKey
from training.data.transfer import to_device
from training.head_solver import solve_head
from training.loop import forward_all, seed_dropout
from training.world.collectives import gather_rows, largest_over_ranks
from training.world.world import World

if TYPE_CHECKING:
    from training.setup import Run
    from training.steps.context import TrainContext

MOST_DIFFERENCE = 0.01  # as a share of the largest number: a wrong dropout makes more, another rounding less


def cache_features(context: Run, loop: TrainContext) -> int:
    """Let the loaders yield features in the place of images, and the model take either; a collective.

    Returns:
        The number of the signal that ended it, 0 for none.

    Raises:
        UserError: on all ranks, if the model has several heads, or one that does not read a vector; if what is before
            it is not the same in training as in evaluation; if an image on any rank cannot be read.
    """
    engine, world, begin = context.state.engine, context.world.data, time.perf_counter()
    heads = {name.rpartition(".")[0] for name in context.built.head_parameter_names}
    if len(heads) != 1:
        raise AgreedError("--features cached: this model has several heads: leave it out.")
    head = engine.module.get_submodule(*heads)
    read: list[torch.Tensor] = []
    hook = head.register_forward_pre_hook(lambda _head, inputs: read.append(inputs[0]))
    loaders = (context.train_loader, context.val_loader)
    sets = [_Features(loader, read, world) for loader in loaders]
    engine.module.eval()
    for loader, features in zip(loaders, sets, strict=True):
        with loop.timing.clock.evaluation, torch.no_grad():
            once = loader.each_once()
            stop_signal = forward_all(engine, once, features.add, context=loop, is_interruptible=True)
        if stop_signal:
            hook.remove()
            return stop_signal
    context.freezer.start_epoch(only_head=False)
    difference = _take_either(context, head, sets[0], read)
    hook.remove()
    for loader, features in zip(loaders, sets, strict=True):
        loader.read_from(features.batch)
    if context.config.solver == "lbfgs":
        own = context.data.train.source.loss_weights
        solve_head(context, head, sets[0].values, sets[0].weights if own is None else sets[0].weights * own)
    width, seconds = sets[0].values.shape[1], time.perf_counter() - begin
    context.loggers.message(
        f"features     {len(sets[0].values) + len(sets[1].values)} images went through the network once, in "
        f"{format_duration(seconds)}: the head trains on {width} numbers of each"
    )
    if difference:
        context.loggers.message(
            f"note: here the last bits of a feature depend on its place in the batch (by {difference:.0e}): "
            "--features computed may give other last bits of the weights"
        )
    return 0


@torch.no_grad()
def _take_either(context: Run, head: nn.Module, features: _Features, read: list[torch.Tensor]) -> float:
    """Let the model take features [B, D], too, in training after the dropout before its head; a collective.

    The dropout is the one with which, of the same random numbers, features give what images give.

    Returns:
        By how much they differ, as a share of the largest number.
    """
    engine, device = context.state.engine, context.world.device
    module, rate = engine.module, 0.0
    compute = module.forward

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        return compute(inputs) if inputs.ndim > 2 else head(F.dropout(inputs, rate, module.training))

    def results(inputs: torch.Tensor) -> list[torch.Tensor]:
        seed_dropout(context.config.seed, 0, 0, device)
        logits = engine.forward(inputs)
        drawn = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return [read.pop().double(), logits.double(), drawn.double()]

    module.forward = forward
    images, cached = (part.flip(0) for part in features.first)  # not where they were in the batch
    wanted = results(images)
    own = {child.p for child in module.modules() if isinstance(child, nn.Dropout)}
    rates = sorted(own | {0.0, float(getattr(module, "drop_rate", 0.0))})
    differences = []
    for rate in rates:  # noqa: B007  # `forward` reads it
        found = results(cached)
        differences.append(max(_difference(*pair) for pair in zip(found, wanted, strict=True)))
    largest = largest_over_ranks(torch.stack(differences).to(device), context.world.data)
    rate = rates[int(largest.argmin())]
    if not largest.min() <= MOST_DIFFERENCE:
        raise AgreedError(
            "--features cached: this model computes something after its head, or before it otherwise in training than "
            "in evaluation: give --drop-path 0, and --dropout 0 if it is not just before the head, or leave it out."
        )
    return float(largest.min())


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)


class _Features:
    """What the head reads of each image of a set, on every rank.

    Args:
        loader: of the images.
        read: to which each forward of the network appends what its head reads, [B, D].
        world: the ranks that read different images.

    Attributes:
        values: [images, D] on the device.
        weights: float32 [images], 0 for those that could not be read.
        first: images and features of this rank's first batch.
    """

    def __init__(self, loader: Loader, read: list[torch.Tensor], world: World) -> None:
        self._source, self._read, self._world = loader.dataset.source, read, world
        self.weights = torch.zeros(len(loader.dataset))
        self.values = torch.empty(0)
        self.first: tuple[torch.Tensor, ...] = ()

    def add(self, batch: Batch, _logits: torch.Tensor) -> None:
        """Keep the features of all ranks' batches; a collective."""
        own = self._read.pop()
        if own.ndim != 2:
            shape = " x ".join(map(str, own.shape[1:]))
            raise AgreedError(f"--features cached: this head reads {shape} numbers, no vector: leave that out.")
        if not self.first:
            self.first, self.values = (batch.images, own), own.new_zeros(len(self.weights), own.shape[1])
        numbers = torch.where(batch.weights > 0, to_device(batch.indices, own.device), -1)
        places = gather_rows(numbers, self._world).view(-1)
        # as bytes: gloo knows no bf16
        rows = gather_rows(own.contiguous().view(torch.uint8).view(-1), self._world).view(own.dtype)
        is_read = places >= 0
        self.values[places[is_read]] = rows.view(len(places), -1)[is_read]
        self.weights[places[is_read].cpu()] = 1.0

    def batch(self, key: BatchKey) -> Batch:
        """Return the batch of a key, with features in the place of images; those of unreadable images have weight 0."""
        indices, own = torch.from_numpy(key.indices), self._source.loss_weights
        return Batch(
            self.values.index_select(0, to_device(indices, self.values.device)),
            self._source.labels[indices],
            torch.from_numpy(key.weights) * self.weights[indices],
            indices,
            epoch=key.epoch,
            leaf=key.leaf,
            is_transformed=True,
            loss_weights=None if own is None else own[indices],
        )
