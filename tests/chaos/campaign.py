"""Many trainings with many faults: which fault comes in which training, and when."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

from rich.console import Console

from tests.chaos.case import Case, make_case, run_folder, run_oracle
from tests.chaos.disk import why_no_disk
from tests.chaos.faults import FAULTS
from tests.chaos.records import Draw, TrialResult
from tests.chaos.trial import Trial

FAULTS_PER_TRAINING = (6, 10)
START_UP_SHARE = 0.2  # of the faults come while the ranks start
START_UP_SECONDS = 6.0  # what a start takes, about
LONGEST_DELAY_SECONDS = 1.5


class Deck:
    """Kinds of faults in random order, all equally often.

    Args:
        kinds: the kinds.
        rng: shuffles.
    """

    def __init__(self, kinds: Sequence[str], rng: Random) -> None:
        self._kinds, self._rng = list(kinds), rng
        self._cards: list[str] = []

    def draw(self, impossible: frozenset[str]) -> str | None:
        """Take the first card that is possible; None where no kind is."""
        if set(self._kinds) <= impossible:
            return None
        if not set(self._cards) - impossible:
            self._cards += self._rng.sample(self._kinds, len(self._kinds))
        card = next(kind for kind in self._cards if kind not in impossible)
        self._cards.remove(card)
        return card

    def put_back(self, kinds: Sequence[str]) -> None:
        """Lay kinds that were not needed on top."""
        self._cards[:0] = kinds


class Campaign:
    """Runs trainings until enough faults were injected.

    Args:
        seed: decides kinds, moments and victims.
        kinds: names of `FAULTS`.
        folder: for all files; those of good trainings are removed at once.
        console: for one line per fault.
        first: number of the first training.

    Attributes:
        results: the trainings that have ended.
        skipped: why a kind cannot be injected here.
    """

    def __init__(self, seed: int, kinds: Sequence[str], folder: Path, console: Console, first: int = 0) -> None:
        self._seed, self._folder, self._console, self._first = seed, folder, console, first
        self.results: list[TrialResult] = []
        self.skipped = {kind: why_no_disk() for kind in kinds if FAULTS[kind].needs == "disk" and why_no_disk()}
        self._deck = Deck([kind for kind in kinds if kind not in self.skipped], Random(seed))

    def run(self, faults: int, budget_minutes: float = float("inf")) -> None:
        """Inject this many faults, or as many as the time allows; the last training may then finish.

        Raises:
            OracleError: where a training without faults fails.
        """
        deadline = time.time() + 60 * budget_minutes
        number = self._first
        while (done := self._injected()) < faults and time.time() < deadline:
            self.results.append(self._run_training(number, faults - done, faults, deadline))
            number += 1

    def _injected(self) -> int:
        return sum(len(result.injections) for result in self.results)

    def _run_training(self, number: int, most: int, faults: int, deadline: float) -> TrialResult:
        case = make_case(number)
        rng = Random(f"{self._seed}-{number}")
        draws = self._draw(case, min(most, rng.randint(*FAULTS_PER_TRAINING)), number)
        oracle = self._oracle(case.oracle)
        result = TrialResult(number, case, self._folder / f"training-{number:03d}")
        log_dir = result.folder / "logs"
        disk = None
        if any(FAULTS[draw.kind].needs == "disk" for draw in draws):
            disk = rng.choice([log_dir, run_folder(log_dir) / "checkpoints"])
        self._say(number, f"{case}" + (f", a small disk for {disk.name}" if disk else ""))
        injected = self._injected()
        say = partial(self._say_fault, result, injected, faults)
        result = Trial(result, oracle, disk, say).run(draws, deadline)
        self._deck.put_back(result.unused)
        self._say(number, f"{_verdict(result)} after {result.seconds:.0f} s, launches on {result.ranks} ranks")
        if result.identical:
            shutil.rmtree(result.folder)
        return result

    def _draw(self, case: Case, count: int, number: int) -> list[Draw]:
        impossible = {kind for kind, fault in FAULTS.items() if fault.needs == "workers" and not case.workers}
        draws = []
        for index in range(count):
            kind = self._deck.draw(frozenset(impossible))
            if kind is None:
                break
            draws.append(draw_moment(kind, Random(f"{self._seed}-{number}-{index}")))
        return draws

    def _oracle(self, case: Case) -> Path:
        recipe = f"{case.strategy}-{case.engine}-{case.micro_batches}-{case.recipe}-{case.tensor}"
        folder = self._folder / f"oracle-{recipe}"
        if not folder.exists():
            start = time.time()
            run_oracle(case, folder)
            self._console.print(f"uninterrupted: {case}: {time.time() - start:.0f} s", highlight=False)
        return run_folder(folder / "logs")

    def _say(self, number: int, line: str) -> None:
        self._console.print(f"training {number}: {line}", markup=False, highlight=False)

    def _say_fault(self, result: TrialResult, before: int, faults: int, line: str) -> None:
        count = before + len(result.injections)
        self._console.print(f"[{count:3d}/{faults}] {line}", markup=False, highlight=False)


def draw_moment(kind: str, rng: Random) -> Draw:
    """Draw when a fault comes: at start-up, or after progress."""
    at_start_up = rng.random() < START_UP_SHARE and FAULTS[kind].at_start_up
    return Draw(kind, at_start_up, rng.uniform(0.0, START_UP_SECONDS if at_start_up else LONGEST_DELAY_SECONDS), rng)


def _verdict(result: TrialResult) -> str:
    if result.miss:
        return f"MISS: {result.miss}"
    if result.differences:
        return f"MISS: other bytes than the uninterrupted run: {'; '.join(result.differences)}"
    return "survived, bit-identical"
