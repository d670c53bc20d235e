"""Classes by nearest neighbours: how good the features of a network are that has no classifier."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from zerovision.training.data.loader import Loader
from zerovision.training.data.reader import Batch
from zerovision.training.data.transfer import to_device
from zerovision.training.world.collectives import gather_rows
from zerovision.training.world.world import World

# Wu et al. 2018 (https://arxiv.org/abs/1805.01978, section 3.4), with the number of neighbours that DINO found best
# (Caron et al. 2021, https://arxiv.org/abs/2104.14294, appendix E).
NEIGHBOURS, TEMPERATURE = 20, 0.07
MOST_COMPARED = 2**16  # training images; of a larger set every second, third, ... one


class Neighbours:
    """Training images as a network without augmentation sees them, and the classes of others by these.

    Args:
        loader: of the training images to compare with.
        num_classes: of the data set.
        world: the ranks.

    Attributes:
        loader: as given.
    """

    def __init__(self, loader: Loader, num_classes: int, world: World) -> None:
        self.loader, self._num_classes, self._world = loader, num_classes, world
        self._features: list[torch.Tensor] = []
        self._facts: list[torch.Tensor] = []
        self._labels = self._bank = torch.empty(0)

    def add(self, batch: Batch, features: torch.Tensor) -> None:
        """Keep features [B, F] of a batch of the loader until `gather`."""
        self._features.append(F.normalize(features.float()))
        facts = (to_device(batch.indices, features.device), batch.labels, batch.weights.long())
        self._facts.append(torch.stack(facts, dim=1))

    def gather(self) -> None:
        """Share the features of all ranks, in the order of their images on any number of them; a collective."""
        features, facts = (
            gather_rows(own.reshape(-1), self._world).view(-1, own.shape[1])
            for own in (torch.cat(self._features), torch.cat(self._facts))
        )
        self._features, self._facts = [], []
        order = facts[:, 0].argsort(stable=True)
        order = order[facts[order, 2] > 0]
        self._bank, self._labels = features[order], facts[order, 1]

    def log_probabilities(self, features: torch.Tensor) -> torch.Tensor:
        """Return float32 [B, classes] for features [B, F]: the logarithm of `votes`.

        One further vote is for all classes alike, so that no probability is 0.
        """
        shares = votes(F.normalize(features.float()), self._bank, self._labels, self._num_classes)
        return ((NEIGHBOURS * shares + 1 / self._num_classes) / (NEIGHBOURS + 1)).log()


def votes(features: torch.Tensor, bank: torch.Tensor, labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return the votes of the nearest for each class, weighted by their cosines: float32 [B, classes], 1 in all.

    Args:
        features: [B, F], of length 1.
        bank: [N, F], of length 1.
        labels: int64 [N], of the bank.
        num_classes: of the data set.
    """
    nearest = (features @ bank.T).topk(min(NEIGHBOURS, len(bank)), dim=1)
    weights = (nearest.values / TEMPERATURE).softmax(1)[:, None]
    return (weights @ F.one_hot(labels[nearest.indices], num_classes).float())[:, 0]
