"""Chooses the samples of each rank and step by pure functions of (seed, epoch, step), for any number of ranks.

An epoch of N samples is one permutation of them, divided into whole optimizer steps. The last step is padded with
samples from the start of the same permutation, with weight 0, so each sample counts exactly once per epoch and all
batches have the same shape. The samples of any step can be computed without those of earlier steps, so resuming within
an epoch reads no unnecessary data.

With balanced sampling or repeated augmentation, an epoch still has N samples, but an image may occur several times,
with different augmentation, or not at all.

With `--order shards`, the permutation reads the shards one after another, so that each byte is fetched once; see
`_by_shards`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zerovision.training.base.errors import UserError
from zerovision.training.base.leaves import Leaves
from zerovision.training.data.randomness import COPY
from zerovision.training.data.reading.sources import FileSource, Source

if TYPE_CHECKING:
    from zerovision.training.base.progress import Progress
    from zerovision.training.data.settings import DataSettings


class BatchKey(NamedTuple):
    """The samples of one batch."""

    epoch: int  # determines the augmentation
    indices: np.ndarray  # int64 [B], positions in the data set
    weights: np.ndarray  # float32 [B], 1 for a sample and 0 for padding
    draw_keys: np.ndarray  # int64 [B], for the augmentation: index + k * COPY for copy k of a sample in the epoch
    leaf: int = 0  # index of the micro-batch in the epoch, over all ranks; also the key of draws for all of it
    wants_digests: bool = False  # whether to compute `Batch.digests`


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The training batches of every rank.

    Attributes:
        num_samples: Size N of the training set, at least 1.
        batch_size_per_rank: Number of samples B in one micro-batch.
        accumulation_steps: Number of micro-batches A per rank in one optimizer step.
        world_size: Number of ranks R.
        seed: Seed that determines the order.
        labels: int64 [N] for epochs with equally many samples of each class; None for epochs with every sample once.
        repeats: Number of consecutive copies of each sample in an epoch.
        groups: Number of equal groups of ranks, each of which averages over its own samples.
        places: int64 [N, 2], positions in shards, which determine the order (see `Images.shards`); None for a random
            order.
        window: Number of neighboring samples among which each sample is shuffled; used only with `places`.
        in_turn: See `Leaves`.
    """

    num_samples: int
    batch_size_per_rank: int
    accumulation_steps: int
    world_size: int
    seed: int
    labels: np.ndarray | None = None
    repeats: int = 1
    groups: int = 1
    places: np.ndarray | None = None
    window: int = 1
    in_turn: int = 1

    @property
    def leaves(self) -> Leaves:
        """The leaves of a step."""
        return Leaves(self.world_size, self.accumulation_steps, self.in_turn)

    @property
    def global_batch(self) -> int:
        """Number of samples in one optimizer step: G = B x A x R."""
        return self.batch_size_per_rank * self.accumulation_steps * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in one epoch: N / G, rounded up."""
        return -(-self.num_samples // self.global_batch)

    def images(self, first: int, last: int) -> int:
        """Return the number of samples in steps `first` to `last` - 1, over all ranks, without padding."""

        def before(step: int) -> int:
            epochs, step = divmod(step, self.steps_per_epoch)
            return epochs * self.num_samples + step * self.global_batch

        return before(last) - before(first)

    def position(self, progress: Progress) -> int:
        """Return the number of optimizer steps that the run has completed."""
        return progress.epoch * self.steps_per_epoch + progress.step

    def draw_keys(self, epoch: int) -> np.ndarray:
        """Return the draw keys (see `BatchKey`) of `epoch` in order: int64 [N], the same for any number of ranks.

        If each sample occurs once, these keys are the positions in the data set.
        """
        return _order(self, epoch)

    @cached_property
    def in_shards(self) -> tuple[np.ndarray, np.ndarray]:
        """The samples in shard order, int64 [N], and the number of samples in each shard."""
        assert self.places is not None
        shards, within = self.places.T
        return np.lexsort((within, shards)), np.unique(shards, return_counts=True)[1]

    def micro_batch(self, epoch: int, step: int, micro_step: int, rank: int) -> BatchKey:
        """Return the samples of one forward pass of one rank.

        Leaf l of step k contains position k*G + l*B and the next B-1 positions. The leaves of a step depend on the
        numbers of ranks R and of accumulation steps A only through their product; `base.leaves` assigns leaves to
        ranks. Repeated samples are distributed over the leaves in turn, as timm's sampler distributes them over ranks:
        leaf l contains every position k*G + l + i*R*A.
        """
        leaves, leaf = self.world_size * self.accumulation_steps, self.leaves.number(rank, micro_step)
        positions = self._positions(step, leaf)
        weights = (positions < self.num_samples).astype(np.float32)
        draw_keys = self.draw_keys(epoch)[positions % self.num_samples]
        return BatchKey(epoch, draw_keys % COPY, weights, draw_keys, step * leaves + leaf)

    def _positions(self, step: int, leaf: int) -> np.ndarray:
        """Return the positions of a leaf's samples in the epoch's order, int64 [B]; positions from N on are padding."""
        leaves, places = self.world_size * self.accumulation_steps, np.arange(self.batch_size_per_rank)
        places = leaf * self.batch_size_per_rank + places if self.repeats == 1 else leaf + leaves * places
        return step * self.global_batch + places

    @property
    def batches_per_rank(self) -> int:
        """Number of micro-batches that every rank reads in one epoch."""
        return self.steps_per_epoch * self.accumulation_steps

    def epoch_keys(self, epoch: int, rank: int, first_step: int = 0) -> Iterator[BatchKey]:
        """Yield the micro-batches of `rank` in order, from optimizer step `first_step` to the end of the epoch."""
        for step, micro_step in product(range(first_step, self.steps_per_epoch), range(self.accumulation_steps)):
            yield self.micro_batch(epoch, step, micro_step, rank)

    def real_samples(self, step: int, rank: int = 0) -> int:
        """Return the number of samples in a step of the epoch without padding, over all ranks of `rank`'s group."""
        if self.groups == 1:
            return min(self.global_batch, self.num_samples - step * self.global_batch)
        return sum(int((self._positions(step, leaf) < self.num_samples).sum()) for leaf in self.leaves_of_group(rank))

    def leaves_of_group(self, rank: int) -> range:
        """Return the leaves of a step that a rank's group computes; with one group, these are all leaves."""
        length = self.world_size // self.groups * self.accumulation_steps
        first = rank * self.accumulation_steps // length * length
        return range(first, first + length)

    def loss_scale_for(self, step: int, rank: int = 0) -> float:
        """Return the factor s that makes averages exact: the leaves of the rank's group per `real_samples(step, rank)`.

        With `s * sum(weights * losses)` as the loss of a micro-batch, the average over ranks and micro-steps that
        data-parallel training computes is the mean loss over the real samples of the step. A group without real
        samples, which can occur in the last step of an epoch, has a loss of 0.
        """
        return len(self.leaves_of_group(rank)) / max(self.real_samples(step, rank), 1)


@dataclass(frozen=True)
class EvaluationPlan:
    """The evaluation batches of every rank: each sample once, in the same number of equally large batches on all ranks.

    Batch b contains samples b*B to b*B + B-1 for any number of ranks, because the last bit of a sample's logits may
    depend on the sample's place in the batch.

    Attributes:
        num_samples: Size N of the validation set, at least 1.
        batch_size_per_rank: Number of samples B in one batch.
        world_size: Number of ranks R.
        stride: Distance between samples, in positions of the data set.
    """

    num_samples: int
    batch_size_per_rank: int
    world_size: int
    stride: int = 1

    @property
    def batches_per_rank(self) -> int:
        """Number of batches that every rank evaluates; the last batches may contain only padding."""
        return -(-self.num_samples // (self.batch_size_per_rank * self.world_size))

    def epoch_keys(self, epoch: int, rank: int, first_step: int = 0) -> Iterator[BatchKey]:
        """Yield batches r, r+R, r+2R, ... of rank r, the same in every epoch; padding has weight 0."""
        for step in range(first_step, self.batches_per_rank):
            batch = step * self.world_size + rank
            positions = batch * self.batch_size_per_rank + np.arange(self.batch_size_per_rank)
            indices = positions % self.num_samples * self.stride
            yield BatchKey(0, indices, (positions < self.num_samples).astype(np.float32), indices)


def build_plan(
    config: DataSettings, source: Source, world_size: int, views: int = 1, groups: int = 1, in_turn: int = 1
) -> BatchPlan:
    """Build a run's plan for a training set, with at least `views` consecutive copies of each sample; see `BatchPlan`.

    Raises:
        UserError: If `--order shards` is used for a set that does not consist of several shards.
    """
    labels, places = source.labels, None
    if config.order == "shards":
        places = source.images.shards() if isinstance(source, FileSource) else np.empty((0, 2))
        if len(np.unique(places[:, 0])) < 2:
            raise UserError(
                f"--order shards: --data {config.data} does not consist of several shards: use tar or Parquet files "
                "(python scripts/pack.py DATA OUT makes tar files), or leave --order out."
            )
    return BatchPlan(
        len(labels),
        config.micro_batch,
        config.gradient_accumulation_steps,
        world_size,
        config.seed,
        # A copy, because sending a tensor to data workers moves it into shared memory and invalidates views of it.
        labels.numpy().copy() if config.sampling == "balanced" else None,
        max(config.repeated_augmentation, views),
        groups=groups,
        places=places,
        window=config.shuffle_window,
        in_turn=in_turn,
    )


@lru_cache(maxsize=2)
def _order(plan: BatchPlan, epoch: int) -> np.ndarray:
    """Return the `BatchKey.draw_keys` of an epoch's samples in order: int64 [N], read-only.

    Repeated augmentation (Berman et al. 2019, https://arxiv.org/abs/1902.05509, section 3.2; timm's
    `RepeatAugSampler`): each of the first N / `repeats` samples (rounded up) occurs `repeats` times in succession.
    """
    # NumPy guarantees the random bits of a bit generator, but not the order of its shuffle. Sorting by random bits
    # keeps a run resumable with a different version of NumPy. Equal keys (1 in 10^7 at a million) stay in order.
    bits = np.random.Philox(key=np.array([plan.seed, epoch], dtype=np.uint64))
    draws, repeats = bits.random_raw(plan.num_samples), plan.repeats
    keys = np.argsort(draws, kind="stable") if plan.places is None else _by_shards(plan, draws, bits)
    distinct = -(-plan.num_samples // repeats)
    if plan.labels is not None:
        keys = _balanced(keys, plan.labels, bits.random_raw(distinct), epoch)
    if repeats > 1:
        index, copy = keys[:distinct, None] % COPY, keys[:distinct, None] // COPY
        keys = (index + COPY * (copy * repeats + np.arange(repeats))).reshape(-1)[: plan.num_samples]
    keys.setflags(write=False)
    return keys


def _balanced(permutation: np.ndarray, labels: np.ndarray, bits: np.ndarray, epoch: int) -> np.ndarray:
    """Return M keys, with equally many samples of each class to within one, shuffled by `bits` (uint64 [M]).

    Each class takes its samples in the order of the permutation until it has its share, so samples of a large class
    occur only in some epochs, and samples of a small class are repeated as evenly as possible.
    """
    classes, counts = np.unique(labels, return_counts=True)
    by_class = permutation[np.argsort(labels[permutation], kind="stable")]
    # a different class comes first in each epoch, and has one more sample if the number of classes does not divide M
    turn, shift = np.divmod(np.arange(len(bits)), len(classes))
    chosen = (shift + epoch) % len(classes)
    copy, place = np.divmod(turn, counts[chosen])
    keys = by_class[(np.cumsum(counts) - counts)[chosen] + place] + COPY * copy
    return keys[np.argsort(bits, kind="stable")]


def _by_shards(plan: BatchPlan, draws: np.ndarray, bits: np.random.Philox) -> np.ndarray:
    """Return the samples in an order that goes through the shards once: int64 [N].

    The shards are shuffled, and each sample is moved back by up to `window` places, wrapping around at the end. Samples
    read at about the same time therefore come from a stretch of about `window` samples, whose shards are opened one
    after another. With a window of N or more, every order is equally likely. `draws`, uint64 [N], are the samples'
    random bits; `bits` generates those of the shards.
    """
    samples, counts = plan.in_shards
    shards = np.argsort(bits.random_raw(len(counts)), kind="stable")
    firsts, counts = (np.cumsum(counts) - counts)[shards], counts[shards]
    shuffled = samples[np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(len(samples))]
    moved = (np.arange(len(samples)) + (draws % min(plan.window, len(samples))).astype(np.int64)) % len(samples)
    return shuffled[np.argsort(moved << 20 | (draws >> 44).astype(np.int64), kind="stable")]  # breaks ties at random
