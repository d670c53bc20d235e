"""Areas under the curves of each class against all others, the same on any number of ranks.

Each rank keeps the probabilities of its own samples. It counts, for every sample of all ranks, how many of its own are
given that sample's class with at least its probability. The counts are whole numbers: their sums over the ranks are
exact, and all that is exchanged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from zerovision.training.world.collectives import copy_from_main, sum_over_ranks
from zerovision.training.world.world import World

SORTED_AT_ONCE = 2**22  # probabilities


class Areas(NamedTuple):
    """Means over the classes that have samples; NaN of none, or of probabilities that are not finite.

    Attributes:
        auroc: area under the receiver operating characteristic: the share of pairs of a sample of the class and
            another one in which the first has the higher probability, ties counting half (Mann and Whitney 1947;
            Hanley and McNeil 1982, https://doi.org/10.1148/radiology.143.1.7063747); of classes that do not have all
            samples.
        map: mean average precision: of the samples of a class, the mean share of that class among all samples with
            at least the same probability.
    """

    auroc: float
    map: float


def find_areas(own: Sequence[torch.Tensor], labels: np.ndarray, true: np.ndarray, world: World) -> Areas:
    """Return the areas of an evaluation; a collective.

    Args:
        own: this rank's batches of probabilities, float32 [B, C]; -1 for padding.
        labels: int64 [N], the true classes of the samples of all ranks.
        true: float32 [N], the probabilities of these.
        world: the ranks.
    """
    if not len(labels) or not np.isfinite(true).all():
        return Areas(math.nan, math.nan)
    order, classes = np.lexsort((true, labels)), own[0].shape[1]
    starts = np.searchsorted(labels[order], np.arange(classes + 1)).tolist()
    samples = list(itertools.starmap(slice, itertools.pairwise(starts)))
    true = true[order]
    thresholds = torch.from_numpy(true).to(own[0].device)
    counts = torch.zeros(2, len(true), dtype=torch.int64, device=own[0].device)
    at_once = max(SORTED_AT_ONCE // sum(map(len, own)), 1)
    for first in range(0, classes, at_once):
        columns = torch.cat([batch[:, first : first + at_once] for batch in own]).T.contiguous()
        for row, place in zip(columns.sort(dim=1).values, samples[first : first + at_once], strict=True):
            counts[:, place] = _count(row, thresholds[place])
    counts = sum_over_ranks(counts, world.data)
    copy_from_main([counts], world.tensor)  # all decide by the same bits
    at_least, above = counts.cpu().numpy()
    found = [_class_areas(true[place], at_least[place], above[place], len(true)) for place in samples]
    return Areas(*(_mean([area for area in column if area is not None]) for column in zip(*found, strict=True)))


def _count(values: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Return how many of the ascending values are at least, and how many above, each threshold: int64 [2, T]."""
    below = [torch.searchsorted(values, thresholds, right=right) for right in (False, True)]
    return len(values) - torch.stack(below)


def _class_areas(
    own: np.ndarray, at_least: np.ndarray, above: np.ndarray, samples: int
) -> tuple[float | None, float | None]:
    """Return AUROC and average precision of a class, each None if it is not defined.

    Args:
        own: float32 [P], ascending: of the samples of the class, the probabilities of it.
        at_least: int64 [P], how many of all samples have at least that probability.
        above: int64 [P], how many have a higher one.
        samples: N.
    """
    if not len(own):
        return None, None
    others, (own_at_least, own_above) = samples - len(own), _count(*[torch.from_numpy(own)] * 2).numpy()
    # Each pair that is in order counts 2, each tie 1.
    in_order = int((2 * others - (at_least - own_at_least) - (above - own_above)).sum())
    precision = math.fsum(own_at_least / at_least) / len(own)
    return in_order / (2 * len(own) * others) if others else None, precision


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
