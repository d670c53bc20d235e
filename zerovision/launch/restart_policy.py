"""Restarts a training job after every failure that a restart may fix.

If memory runs out, `--on-oom adapt` restarts the job with the next smaller settings.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from zerovision.launch.arguments import check_training
from zerovision.launch.node_run import PASSED_ON, Ending
from zerovision.launch.process_tree import POLL_SECONDS
from zerovision.training.base.errors import OUT_OF_MEMORY_EXIT_CODE
from zerovision.training.base.units import plural
from zerovision.training.out_of_memory import advise, next_rung

LONGEST_DELAY_SECONDS = 30.0
NODES_BACK_CODE = -1  # not an exit code: the ranks were stopped so that the next start can use more nodes


@dataclass(frozen=True)
class Started:
    """The outcome of one start, or of all starts."""

    ending: Ending
    run_name: str  # '' if rank 0 has not reported it
    position: int  # of the newest saved checkpoint, or -1
    has_gpus: bool = True


def smaller_settings(training: list[str], ranks: int, reason: str, *, has_gpus: bool) -> list[str]:
    """Print what follows a lack of memory; return flags for the next smaller settings, or [] to end the launch."""
    config = check_training(training)
    rung = next_rung(config, ranks, has_gpus=has_gpus)
    if rung is None or config.on_oom == "stop":
        print(f"{reason}; {advise(config, ranks, has_gpus=has_gpus)}", file=sys.stderr, flush=True)
        return []
    print(f"{reason}: starting again with {rung.describe()}", file=sys.stderr, flush=True)
    return rung.flags


class RestartPolicy:
    """Counts restarts, and decides how long to wait before each."""

    def __init__(self, allowed: int) -> None:
        """Allow this many restarts in a row without progress, that is, without a newer checkpoint."""
        self.total = 0
        self._allowed = allowed
        self._in_a_row = 0
        self._position = -1

    def after_failure(self, reason: str, position: int) -> float | None:
        """Print to stderr what happens next; return the seconds to wait before the next start, or None to give up.

        `position` is that of the newest checkpoint since the last start, or -1.
        """
        if position > self._position:
            self._position, self._in_a_row = position, 0
        if self._in_a_row >= self._allowed:
            print(f"{reason}: gave up after {plural(self._in_a_row, 'restart')} without progress", file=sys.stderr)
            return None
        delay_s = min(2.0**self._in_a_row, LONGEST_DELAY_SECONDS) if self._in_a_row else 0.0
        self.total, self._in_a_row = self.total + 1, self._in_a_row + 1
        when = f" in {delay_s:g} s" if delay_s else ""
        print(f"{reason}: restart {self._in_a_row} of {self._allowed}{when}", file=sys.stderr, flush=True)
        return delay_s


def start_until_done(
    start: Callable[[int, list[str]], Started],
    restarts: RestartPolicy,
    training: list[str],
    ranks: int,
    received: list[int],
) -> Started:
    """Start a training job, and restart it after failures; return how the last start ended, and the newest checkpoint.

    `start` runs the job once, given the number of restarts so far and the flags that resume its run. Signal handlers
    append to `received`.
    """
    run_name, newest, smaller = "", -1, list[str]()
    while True:
        started = start(restarts.total, smaller + ([f"--run-name={run_name}"] if run_name else []))
        ending, run_name, newest = started.ending, started.run_name or run_name, max(newest, started.position)
        delay_s = None
        flags: list[str] = []
        if ending.code == OUT_OF_MEMORY_EXIT_CODE and not received:
            flags = smaller_settings([*training, *smaller], ranks, ending.reason, has_gpus=started.has_gpus)
            smaller += flags
        if ending.code == NODES_BACK_CODE or flags:
            restarts.total, delay_s = restarts.total + 1, 0.0  # not counted as a restart without progress
        elif not ending.is_final:
            delay_s = restarts.after_failure(ending.reason, started.position)
        if delay_s is not None:
            if not (number := signal_within(delay_s, received)):
                continue
            ending = Ending(128 + number, "stopped between two starts")
        return Started(ending, run_name, newest)


def signal_within(seconds: float, received: list[int]) -> int:
    """Wait for a signal; return the signal to send to the ranks, or 0 if none arrives in time."""
    deadline = time.monotonic() + seconds
    while not received and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return PASSED_ON[signal.Signals(received[0])] if received else 0
