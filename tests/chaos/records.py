"""What is drawn, what was done, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from tests.chaos.case import Case
from tests.chaos.faults import FAULTS, Fault


@dataclass(frozen=True)
class Draw:
    """A fault to come: which, and when.

    Attributes:
        kind: its name in `FAULTS`.
        at_start_up: whether it comes as soon as the ranks have begun to start, not after progress.
        delay_s: seconds it waits then.
        rng: decides what is hit.
    """

    kind: str
    at_start_up: bool
    delay_s: float
    rng: Random


@dataclass
class Injection:
    """A fault that happened. Times are wall-clock times in seconds.

    Attributes:
        kind: its name in `FAULTS`.
        text: what was done, and how far the training was.
        at: when.
        ranks: the ranks that lived then.
        done_at: when the injection was over.
        calm_at: from when on progress proves recovery; 0 while the ranks that lived then are not all gone.
        recovered_at: when the training was seen to go on; 0 while it has not.
        overtaken: whether the next fault came before that, so that the time to recover was not measured.
    """

    kind: str
    text: str
    at: float
    ranks: list[psutil.Process]
    done_at: float
    calm_at: float = 0.0
    recovered_at: float = 0.0
    overtaken: bool = False

    @property
    def fault(self) -> Fault:
        """Its line in the table."""
        return FAULTS[self.kind]

    @property
    def seconds_to_recover(self) -> float | None:
        """Seconds from the fault to the first progress after it; None where that was not measured."""
        return self.recovered_at - self.at if self.recovered_at and not self.overtaken else None


@dataclass
class TrialResult:
    """What became of a training.

    Attributes:
        number: counts the trainings.
        case: what was trained.
        folder: where its files are; removed where nothing is to be explained.
        injections: the faults, in order.
        unused: kinds that were to come when the training had finished.
        ranks: of each launch.
        seconds: how long it all took.
        miss: why it did not survive; empty where it did.
        differences: in what it differs from the uninterrupted run; see `compare`.
    """

    number: int
    case: Case
    folder: Path
    injections: list[Injection] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    seconds: float = 0.0
    miss: str = ""
    differences: list[str] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        """Whether the training finished by itself after its last fault."""
        return not self.miss

    @property
    def identical(self) -> bool:
        """Whether it survived and ended with the uninterrupted run's bytes."""
        return self.survived and not self.differences
