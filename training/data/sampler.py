"""The samples that a rank reads at a step: pure functions of (seed, epoch, step), for any number of ranks.

An epoch is one permutation of the samples, divided into whole optimizer steps. The last step is padded with samples
from the start of the same permutation, of weight 0, so each sample counts exactly once per epoch and all batches have
one shape. Any step can be computed without the ones before it: resuming within an epoch reads nothing unnecessarily.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from training.state import Progress


class BatchKey(NamedTuple):
    """The samples of one batch.

    Attributes:
        epoch: Decides the augmentation.
        indices: int64 [B], positions in the data set.
        weights: float32 [B], 1 for a sample and 0 for padding.
        draw_keys: int64 [B], what the augmentation is drawn from: index + k * COPY for copy k of a sample in the epoch.
    """

    epoch: int
    indices: np.ndarray
    weights: np.ndarray
    draw_keys: np.ndarray


@dataclass(frozen=True)
class BatchPlan:
    """The training batches of every rank.

    Attributes:
        num_samples: Size N of the training set, at least 1.
        batch_size_per_rank: Samples B of one micro-batch.
        accumulation_steps: Micro-batches A of each rank in one optimizer step.
        world_size: Ranks R.
        seed: Decides the order.
    """

    num_samples: int
    batch_size_per_rank: int
    accumulation_steps: int
    world_size: int
    seed: int

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step: G = B x A x R."""
        return self.batch_size_per_rank * self.accumulation_steps * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch: N / G, rounded up."""
        return -(-self.num_samples // self.global_batch)

    def position(self, progress: Progress) -> int:
        """Return the number of optimizer steps of the run before the next one."""
        return progress.epoch * self.steps_per_epoch + progress.step

    def permutation(self, epoch: int) -> np.ndarray:
        """Return the order of the samples in `epoch`: int64 [N], read-only, the same for any number of ranks."""
        return _permutation(self.num_samples, self.seed, epoch)

    def micro_batch(self, epoch: int, step: int, micro_step: int, rank: int) -> BatchKey:
        """Return the samples of one forward pass of one rank.

        Micro-batch a of rank r is leaf r*A + a of its step, and leaf l of step k contains the positions k*G + l*B and
        the B-1 after it: the leaves of a step are the same for all ranks and accumulation steps with one product R x A.
        """
        leaf = rank * self.accumulation_steps + micro_step
        first = step * self.global_batch + leaf * self.batch_size_per_rank
        positions = np.arange(first, first + self.batch_size_per_rank)
        weights = (positions < self.num_samples).astype(np.float32)
        indices = self.permutation(epoch)[positions % self.num_samples]
        return BatchKey(epoch, indices, weights, indices)

    def epoch_keys(self, epoch: int, rank: int, first_step: int = 0) -> Iterator[BatchKey]:
        """Yield the micro-batches of `rank` in order, from optimizer step `first_step` to the end of the epoch."""
        for step, micro_step in product(range(first_step, self.steps_per_epoch), range(self.accumulation_steps)):
            yield self.micro_batch(epoch, step, micro_step, rank)

    def real_samples(self, step: int) -> int:
        """Return the samples of optimizer step `step` without padding, over all ranks and micro-steps."""
        return min(self.global_batch, self.num_samples - step * self.global_batch)

    def loss_scale_for(self, step: int) -> float:
        """Return the factor s that makes averages exact: R x A / `real_samples(step)`.

        With `s * sum(weights * losses)` as the loss of a micro-batch, the average over ranks and micro-steps that
        data-parallel training computes is the mean loss over the real samples of the step.
        """
        return self.world_size * self.accumulation_steps / self.real_samples(step)


@dataclass(frozen=True)
class EvaluationPlan:
    """The evaluation batches of every rank: each sample once, the same number of equal batches on all ranks.

    Batch b contains the samples b*B to b*B + B-1 on any number of ranks, since the last bit of a sample's logits may
    depend on its place in the batch.

    Attributes:
        num_samples: Size N of the validation set, at least 1.
        batch_size_per_rank: Samples B of one batch.
        world_size: Ranks R.
    """

    num_samples: int
    batch_size_per_rank: int
    world_size: int

    @property
    def batches_per_rank(self) -> int:
        """Batches that every rank evaluates; some of the last ones may contain nothing but padding."""
        return -(-self.num_samples // (self.batch_size_per_rank * self.world_size))

    def keys(self, rank: int) -> Iterator[BatchKey]:
        """Yield the batches of `rank`: r, r+R, r+2R, ...; padding of the last ones has weight 0."""
        for batch in range(rank, self.batches_per_rank * self.world_size, self.world_size):
            positions = batch * self.batch_size_per_rank + np.arange(self.batch_size_per_rank)
            indices = positions % self.num_samples
            yield BatchKey(0, indices, (positions < self.num_samples).astype(np.float32), indices)


@lru_cache(maxsize=2)
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    # NumPy guarantees the raw bits of a bit generator, but not the order of its shuffle: sorting raw bits keeps a run
    # resumable under another NumPy. Equal keys (1 in 10^7 at a million) stay in order.
    bits = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_samples)
    order = np.argsort(bits, kind="stable")
    order.setflags(write=False)
    return order
