"""The samples that a rank reads at a step: pure functions of (seed, epoch, step), for any number of ranks.

An epoch of N samples is one permutation of them, divided into whole optimizer steps. The last step is padded with
samples from the start of the same permutation, of weight 0, so each sample counts exactly once per epoch and all
batches have one shape. Any step can be computed without the ones before it: resuming within an epoch reads nothing
unnecessarily.

With balanced sampling and repeated augmentation an epoch still has N samples, each of which counts once, but a sample
of the set may be among them several times, as copies that are augmented differently, or not at all.

With `--order shards` the permutation is one that reads the shards of the data one after another, so that each byte of
them is fetched once, see `_by_shards`.
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
    """The samples of one batch.

    Attributes:
        epoch: Decides the augmentation.
        indices: int64 [B], positions in the data set.
        weights: float32 [B], 1 for a sample and 0 for padding.
        draw_keys: int64 [B], what the augmentation is drawn from: index + k * COPY for copy k of a sample in the epoch.
        leaf: Number of the micro-batch in the epoch, over all ranks: what is drawn for all of it.
        wants_digests: Whether to compute `Batch.digests`.
    """

    epoch: int
    indices: np.ndarray
    weights: np.ndarray
    draw_keys: np.ndarray
    leaf: int = 0
    wants_digests: bool = False


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The training batches of every rank.

    Attributes:
        num_samples: Size N of the training set, at least 1.
        batch_size_per_rank: Samples B of one micro-batch.
        accumulation_steps: Micro-batches A of each rank in one optimizer step.
        world_size: Ranks R.
        seed: Decides the order.
        labels: int64 [N]: an epoch has equally many samples of each class; None: each sample once.
        repeats: How often each sample of an epoch occurs in it, in a row.
        groups: Equal ones of ranks of which each takes the mean over its own samples.
        places: int64 [N, 2], places in shards, see `Images.shards`, that decide the order; None: any sample may follow
            any other.
        window: Samples of the shuffled shards among which each is shuffled, if there are places.
        in_turn: As of `Leaves`.
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
        """Samples of one optimizer step: G = B x A x R."""
        return self.batch_size_per_rank * self.accumulation_steps * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch: N / G, rounded up."""
        return -(-self.num_samples // self.global_batch)

    def images(self, first: int, last: int) -> int:
        """Return the samples of the run's steps from `first` to before `last`, over all ranks, without padding."""

        def before(step: int) -> int:
            epochs, step = divmod(step, self.steps_per_epoch)
            return epochs * self.num_samples + step * self.global_batch

        return before(last) - before(first)

    def position(self, progress: Progress) -> int:
        """Return the number of optimizer steps of the run before the next one."""
        return progress.epoch * self.steps_per_epoch + progress.step

    def draw_keys(self, epoch: int) -> np.ndarray:
        """Return the samples of `epoch` in order, as `BatchKey.draw_keys`: int64 [N], the same for any number of ranks.

        If each sample occurs once, these are their positions in the data set.
        """
        return _order(self, epoch)

    @cached_property
    def in_shards(self) -> tuple[np.ndarray, np.ndarray]:
        """The samples as they lie in the shards, one after another, int64 [N]; and how many are in each."""
        assert self.places is not None
        shards, within = self.places.T
        return np.lexsort((within, shards)), np.unique(shards, return_counts=True)[1]

    def micro_batch(self, epoch: int, step: int, micro_step: int, rank: int) -> BatchKey:
        """Return the samples of one forward pass of one rank.

        Leaf l of step k contains the positions k*G + l*B and the B-1 after it: the leaves of a step are the same for
        all ranks and accumulation steps with one product R x A; `base.leaves` says which rank has which.
        Repeated samples are dealt to the leaves in turn, as timm's sampler deals them to the ranks: leaf l contains
        every position k*G + l + i*R*A.
        """
        leaves, leaf = self.world_size * self.accumulation_steps, self.leaves.number(rank, micro_step)
        positions = self._positions(step, leaf)
        weights = (positions < self.num_samples).astype(np.float32)
        draw_keys = self.draw_keys(epoch)[positions % self.num_samples]
        return BatchKey(epoch, draw_keys % COPY, weights, draw_keys, step * leaves + leaf)

    def _positions(self, step: int, leaf: int) -> np.ndarray:
        """Return the positions of a leaf's samples in the order of the epoch, from N on those of padding: int64 [B]."""
        leaves, places = self.world_size * self.accumulation_steps, np.arange(self.batch_size_per_rank)
        places = leaf * self.batch_size_per_rank + places if self.repeats == 1 else leaf + leaves * places
        return step * self.global_batch + places

    @property
    def batches_per_rank(self) -> int:
        """Micro-batches that every rank reads in one epoch."""
        return self.steps_per_epoch * self.accumulation_steps

    def epoch_keys(self, epoch: int, rank: int, first_step: int = 0) -> Iterator[BatchKey]:
        """Yield the micro-batches of `rank` in order, from optimizer step `first_step` to the end of the epoch."""
        for step, micro_step in product(range(first_step, self.steps_per_epoch), range(self.accumulation_steps)):
            yield self.micro_batch(epoch, step, micro_step, rank)

    def real_samples(self, step: int, rank: int = 0) -> int:
        """Return the samples of optimizer step `step` without padding, over the ranks and micro-steps of a group.

        Args:
            step: Of the epoch.
            rank: Of the group.
        """
        if self.groups == 1:
            return min(self.global_batch, self.num_samples - step * self.global_batch)
        leaves = self.leaves_of_group(rank)
        return sum(int((self._positions(step, leaf) < self.num_samples).sum()) for leaf in leaves)

    def leaves_of_group(self, rank: int) -> range:
        """Return the leaves of a step that the group of a rank computes: all if there is one."""
        length = self.world_size // self.groups * self.accumulation_steps
        first = rank * self.accumulation_steps // length * length
        return range(first, first + length)

    def loss_scale_for(self, step: int, rank: int = 0) -> float:
        """Return the factor s that makes averages exact: leaves of the group / `real_samples(step, rank)`.

        With `s * sum(weights * losses)` as the loss of a micro-batch, the average over ranks and micro-steps that
        data-parallel training computes is the mean loss over the real samples of the step. A group without any, in
        the last step of an epoch, has a loss of 0.
        """
        return len(self.leaves_of_group(rank)) / max(self.real_samples(step, rank), 1)


@dataclass(frozen=True)
class EvaluationPlan:
    """The evaluation batches of every rank: each sample once, the same number of equal batches on all ranks.

    Batch b contains the samples b*B to b*B + B-1 on any number of ranks, since the last bit of a sample's logits may
    depend on its place in the batch.

    Attributes:
        num_samples: Size N of the validation set, at least 1.
        batch_size_per_rank: Samples B of one batch.
        world_size: Ranks R.
        stride: From a sample to the next, in positions of the data set.
    """

    num_samples: int
    batch_size_per_rank: int
    world_size: int
    stride: int = 1

    @property
    def batches_per_rank(self) -> int:
        """Batches that every rank evaluates; some of the last ones may contain nothing but padding."""
        return -(-self.num_samples // (self.batch_size_per_rank * self.world_size))

    def epoch_keys(self, epoch: int, rank: int, first_step: int = 0) -> Iterator[BatchKey]:
        """Yield the batches r, r+R, r+2R, ... of rank r, the same in every epoch; padding of the last has weight 0."""
        for step in range(first_step, self.batches_per_rank):
            batch = step * self.world_size + rank
            positions = batch * self.batch_size_per_rank + np.arange(self.batch_size_per_rank)
            indices = positions % self.num_samples * self.stride
            yield BatchKey(0, indices, (positions < self.num_samples).astype(np.float32), indices)


def build_plan(
    config: DataSettings, source: Source, world_size: int, views: int = 1, groups: int = 1, in_turn: int = 1
) -> BatchPlan:
    """Build the plan of a run over a training set, with at least so many views of each sample; see `BatchPlan`.

    Raises:
        UserError: The set has no shards for `--order shards`.
    """
    labels, places = source.labels, None
    if config.order == "shards":
        places = source.images.shards() if isinstance(source, FileSource) else np.empty((0, 2))
        if len(np.unique(places[:, 0])) < 2:
            raise UserError(
                f"--order shards: --data {config.data} is not in several shards: give tar or Parquet files "
                "(python scripts/pack.py DATA OUT makes tar files), or leave --order out."
            )
    return BatchPlan(
        len(labels),
        config.micro_batch,
        config.gradient_accumulation_steps,
        world_size,
        config.seed,
        # A copy: sending a tensor to data workers moves it into shared memory, away from under a view of it.
        labels.numpy().copy() if config.sampling == "balanced" else None,
        max(config.repeated_augmentation, views),
        groups=groups,
        places=places,
        window=config.shuffle_window,
        in_turn=in_turn,
    )


@lru_cache(maxsize=2)
def _order(plan: BatchPlan, epoch: int) -> np.ndarray:
    """Return the keys of an epoch's samples in order, see `BatchKey.draw_keys`: int64 [N], read-only.

    Repeated augmentation (Berman et al. 2019, https://arxiv.org/abs/1902.05509, section 3.2; the `RepeatAugSampler` of
    timm): of the first N / `repeats` samples of the order, rounded up, each is repeated, next to each other.
    """
    # NumPy guarantees the raw bits of a bit generator, but not the order of its shuffle: sorting raw bits keeps a run
    # resumable under another NumPy. Equal keys (1 in 10^7 at a million) stay in order.
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
    """Return keys of as many samples as `bits`, uint64 [M]: each class equally often, to within one sample.

    The samples of a class, in the order of the permutation, follow each other until the class has its share: those of
    a large class are in some epochs only, those of a small one are repeated as equally often as possible.
    """
    classes, counts = np.unique(labels, return_counts=True)
    by_class = permutation[np.argsort(labels[permutation], kind="stable")]
    # from epoch to epoch, another class comes first, and has one sample more if the classes do not divide M
    turn, shift = np.divmod(np.arange(len(bits)), len(classes))
    chosen = (shift + epoch) % len(classes)
    copy, place = np.divmod(turn, counts[chosen])
    keys = by_class[(np.cumsum(counts) - counts)[chosen] + place] + COPY * copy
    return keys[np.argsort(bits, kind="stable")]


def _by_shards(plan: BatchPlan, draws: np.ndarray, bits: np.random.Philox) -> np.ndarray:
    """Return the samples in an order that goes through the shards once: int64 [N].

    The shards are shuffled, and each sample is moved back by up to `window` places, those of the end to the beginning.
    So at any time the samples come from about `window` neighbouring ones, which begin to be read one after another;
    with a window of N or more every order is equally likely.

    Args:
        plan: With `places` and `window`.
        draws: Raw bits of each sample, uint64 [N].
        bits: Where those of the shards come from.
    """
    samples, counts = plan.in_shards
    shards = np.argsort(bits.random_raw(len(counts)), kind="stable")
    firsts, counts = (np.cumsum(counts) - counts)[shards], counts[shards]
    shuffled = samples[np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(len(samples))]
    moved = (np.arange(len(samples)) + (draws % min(plan.window, len(samples))).astype(np.int64)) % len(samples)
    return shuffled[np.argsort(moved << 20 | (draws >> 44).astype(np.int64), kind="stable")]  # equal ones by chance
