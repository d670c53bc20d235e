"""Divergence: an epoch whose losses are not finite, or far above that of guessing."""

from __future__ import annotations

import math

# Times the loss of a uniform guess, log(classes): the geometric mean of the true class's probability is then
# classes ** -10. Good trainings stay far below, also while BatchNorm's running statistics lag behind at the start.
GUESSES_ALLOWED = 10


def find_divergence(train_loss: float, val_loss: float, choices: int) -> str | None:
    """Return the reason why an epoch with these mean losses (nats) has diverged, None if it has not.

    A uniform guess is one of so many choices.
    """
    guess = math.log(max(choices, 2))
    for name, loss in (("validation loss", val_loss), ("training loss", train_loss)):
        if not math.isfinite(loss):
            return f"the {name} is {loss}"
        if loss > GUESSES_ALLOWED * guess:
            return f"the {name} is {loss:.3g}, that of a uniform guess {guess:.3g}"
    return None
