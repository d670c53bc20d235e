"""Starts a training again after every failure that another start may cure."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from launch.node_run import PASSED_ON, Ending
from launch.process_tree import POLL_SECONDS

LONGEST_DELAY_SECONDS = 30.0


@dataclass(frozen=True)
class Started:
    """What came of one start.

    Attributes:
        ending: how it ended.
        run_name: what rank 0 called the run, '' where it did not come so far.
        position: of the newest checkpoint that it saved, -1 for none.
    """

    ending: Ending
    run_name: str
    position: int


class RestartPolicy:
    """Counts restarts, and says how long to wait before each."""

    def __init__(self, allowed: int) -> None:
        """Allow so many restarts in a row without progress, which is a newer checkpoint than any before."""
        self.total = 0
        self._allowed = allowed
        self._in_a_row = 0
        self._position = -1

    def after_failure(self, reason: str, position: int) -> float | None:
        """Say on stderr what follows; return the seconds to wait before the next start, None where none follows.

        Args:
            reason: what happened, without a full stop.
            position: of the newest checkpoint saved since the last start, -1 for none.
        """
        if position > self._position:
            self._position, self._in_a_row = position, 0
        if self._in_a_row >= self._allowed:
            print(f"{reason}: given up after {self._in_a_row} restart(s) without progress", file=sys.stderr)
            return None
        delay_s = min(2.0**self._in_a_row, LONGEST_DELAY_SECONDS) if self._in_a_row else 0.0
        self.total, self._in_a_row = self.total + 1, self._in_a_row + 1
        when = f" in {delay_s:g} s" if delay_s else ""
        print(f"{reason}: restart {self._in_a_row} of {self._allowed}{when}", file=sys.stderr, flush=True)
        return delay_s


def start_until_done(
    start: Callable[[int, list[str]], Started], restarts: RestartPolicy, received: list[int]
) -> tuple[Ending, str]:
    """Start a training, and again after every failure; return how it ended and the run's name.

    Args:
        start: runs it once, given the number of restarts so far and the flags that let it go on with its run.
        restarts: how many there may be.
        received: the list to which the signal handlers append.
    """
    run_name = ""
    while True:
        started = start(restarts.total, [f"--run-name={run_name}"] if run_name else [])
        run_name = started.run_name or run_name
        if started.ending.is_final:
            return started.ending, run_name
        delay_s = restarts.after_failure(started.ending.reason, started.position)
        if delay_s is None:
            return started.ending, run_name
        if number := signal_within(delay_s, received):
            return Ending(128 + number, "stopped between two starts"), run_name


def signal_within(seconds: float, received: list[int]) -> int:
    """Wait; return the signal passed on to ranks that was received before or meanwhile, 0 for none."""
    deadline = time.monotonic() + seconds
    while not received and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return PASSED_ON[signal.Signals(received[0])] if received else 0
