"""Exact sums, divided once: loss, top-1, top-5 and the confusion matrix over all ranks, padding without weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from training.distributed import World, sum_over_ranks

LARGEST_CONFUSION_MATRIX = 1000  # classes; 8 MB of int64


@dataclass(frozen=True)
class Scores:
    """Averages over the samples that count."""

    loss: float
    top1: float
    top5: float
    samples: int
    confusion: torch.Tensor | None = None


class ScoreSums:
    """Sums over batches, kept on the device; nothing is read back before `reduce`."""

    def __init__(self, num_classes: int, device: torch.device, *, with_confusion: bool = False) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._num_classes = num_classes
        self._confusion = None
        if with_confusion and num_classes <= LARGEST_CONFUSION_MATRIX:
            self._confusion = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=device)

    def add(self, losses: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> None:
        """Add one batch.

        Args:
            losses: [B], each sample's loss.
            logits: [B, classes].
            labels: [B] int64.
            weights: [B], 1 for samples that count, 0 for padding.
        """
        with torch.no_grad():
            counted = weights > 0
            best = logits.topk(min(5, self._num_classes), dim=1).indices
            hits = (best == labels[:, None]) & counted[:, None]
            # A padded sample may have an infinite loss: it is selected away, since 0 * inf is nan.
            kept = torch.where(counted, losses.detach().double(), 0.0)
            self._sums += torch.stack([kept.sum(), hits[:, 0].sum(), hits.sum(), counted.sum()])
            if self._confusion is not None:
                cells = labels * self._num_classes + best[:, 0]
                self._confusion.scatter_add_(0, cells, counted.long())

    def state(self) -> torch.Tensor:
        """Return a copy of the sums without the confusion matrix: loss, top-1, top-5, samples; float64 [4]."""
        return self._sums.clone()

    def reset(self) -> None:
        """Begin anew."""
        self._sums.zero_()

    def restore(self, state: torch.Tensor) -> None:
        """Take back what `state` gave."""
        self._sums.copy_(state)

    def keep_if(self, applied: bool | torch.Tensor, state: torch.Tensor) -> None:
        """Take back what `state` gave unless the step was applied; nothing is read from the device."""
        if applied is True:
            return
        self._sums.copy_(state if applied is False else torch.where(applied, self._sums, state))

    def reduce(self, world: World) -> Scores:
        """Return the averages over all ranks' samples; a collective, and a sync with the device."""
        loss, top1, top5, count = sum_over_ranks(self._sums, world).tolist()
        confusion = None
        if self._confusion is not None:
            size = self._num_classes
            confusion = sum_over_ranks(self._confusion, world).view(size, size).cpu()
        divisor = max(count, 1.0)
        return Scores(loss / divisor, top1 / divisor, top5 / divisor, int(count), confusion)


def sample_losses(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return each sample's cross entropy [B] in float32."""
    return F.cross_entropy(logits.float(), labels, label_smoothing=label_smoothing, reduction="none")
