"""What changes from step to step: what a checkpoint contains and resume restores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.base.progress import Progress
from training.engines.engine import Engine

if TYPE_CHECKING:
    from training.observe.scores import ScoreSums


@dataclass
class TrainState:
    """Everything that changes from step to step.

    Dropout, sample order and augmentation are functions of the seed and the position, so no generator is part of it.

    Attributes:
        engine: parameters, buffers, optimizer state, number of applied updates and fp16's loss scale.
        sums: score sums of the running epoch.
        progress: position of the run, best epoch and counts.
    """

    engine: Engine
    sums: ScoreSums
    progress: Progress
