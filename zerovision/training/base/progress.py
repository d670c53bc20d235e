"""The progress of a run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """The position of a run, its best epoch, and its counts of failures.

    Attributes:
        epoch: the epoch to continue with, from 0.
        step: the optimizer step of that epoch to continue with, from 0; if only the evaluation is left, the number of
            steps per epoch.
        best_score: the best validation score so far, where more is better; see `zerovision.training.base.points.merit`.
        best_epoch: the epoch with the best score, from 1; if several epochs have this score, the one with the lowest
            validation loss; 0 before the first evaluation.
        best_loss: the validation loss of the best epoch; 0 before the first evaluation.
        epochs_without_better: number of evaluations since the best score was first reached, for early stopping.
        skipped_steps: number of optimizer steps skipped so far because a gradient was not finite.
        bad_steps_in_row: number of steps skipped in a row up to now.
        diverged_epochs_in_row: number of epochs in a row up to now that diverged; see `zerovision.training.epoch`.
    """

    epoch: int = 0
    step: int = 0
    best_score: float = -1.0
    best_epoch: int = 0
    best_loss: float = 0.0
    epochs_without_better: int = 0
    skipped_steps: int = 0
    bad_steps_in_row: int = 0
    diverged_epochs_in_row: int = 0

    def is_beaten_by(self, score: float, loss: float) -> bool:
        """Return whether an epoch with this merit and this validation loss is better than the best so far."""
        return score > -math.inf and (not self.best_epoch or (score, -loss) > (self.best_score, -self.best_loss))

    def after_epoch(self, score: float, loss: float, *, is_best: bool, has_diverged: bool) -> Progress:
        """Return the progress at the start of the next epoch, given this epoch's validation merit and loss."""
        best: dict[str, Any] = {"best_score": score, "best_epoch": self.epoch + 1, "best_loss": loss} if is_best else {}
        return dataclasses.replace(
            self,
            **best,
            epoch=self.epoch + 1,
            step=0,
            epochs_without_better=0
            if is_best and self.is_beaten_by(score, math.inf)
            else self.epochs_without_better + 1,
            diverged_epochs_in_row=self.diverged_epochs_in_row + 1 if has_diverged else 0,
        )
