"""Watches a launch's ranks on one machine: finds ranks that have died or hung, and prints the stacks of hung ranks."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import sys
import time
from dataclasses import dataclass

import psutil

from zerovision.launch.node_launcher import NodeLauncher
from zerovision.launch.process_tree import POLL_SECONDS, HeartbeatFolder, code_of_zombie, is_alive, send
from zerovision.training.base.errors import (
    CANNOT_SAVE_EXIT_CODE,
    DIVERGED_EXIT_CODE,
    FILE_SERVER_EXIT_CODE,
    OUT_OF_MEMORY_EXIT_CODE,
    TOO_MANY_BAD_STEPS_EXIT_CODE,
    WRONG_GRADIENT_EXIT_CODE,
)
from zerovision.training.base.heartbeat import ENDED, Heartbeat

NO_BEAT = "start"  # the phase of a rank that has not written a heartbeat yet
SUSPECT_SHARE = 0.5  # of the allowed time: if one rank is overdue, all ranks silent for this long are considered hung
STACK_SECONDS = 2.0
STACK_LINES = 15
INNERMOST_LINES = 7
IMPORT_SYSTEM = ('File "<frozen importlib.', '/importlib/__init__.py"')
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
STOP_CODES = frozenset(128 + number for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM))
# The ranks agree on these exit codes: if one rank exits with such a code, the other ranks soon exit on their own.
AGREED_CODES = STOP_CODES | {
    TOO_MANY_BAD_STEPS_EXIT_CODE,
    WRONG_GRADIENT_EXIT_CODE,
    CANNOT_SAVE_EXIT_CODE,
    DIVERGED_EXIT_CODE,
}


@dataclass(frozen=True)
class Death:
    """How a rank ended."""

    rank: int
    process: str  # host and pid of the rank, for messages
    code: int | None  # in Popen's form, -n for signal n; None if unknown
    noted: bool  # whether the rank's last heartbeat contained an exit code
    seconds: float  # when the death was noticed, on the monotonic clock

    @property
    def is_failure(self) -> bool:
        """Whether the other ranks may wait for this rank forever, because it neither finished nor agreed to end."""
        return self.code not in AGREED_CODES and not (self.noted and self.code == 0)

    def describe(self, launcher_code: int) -> str:
        """Return one phrase for messages; `launcher_code` (Popen's form) is used if the rank's code is unknown."""
        code = launcher_code if self.code is None and launcher_code else self.code
        return f"rank {self.rank} ({self.process}) {how_it_ended(code)}"


class RankMonitor:
    """The heartbeats and deaths of the ranks since they were last started."""

    def __init__(self, launcher: NodeLauncher, folder: HeartbeatFolder) -> None:
        self.beats: dict[int, Heartbeat] = {}
        self.deaths: list[Death] = []
        self._launcher, self._folder = launcher, folder
        self._started = self._last_look = self._awake_since = time.monotonic()

    def look(self) -> None:
        """Read the heartbeats and find the ranks that have ended since the last call."""
        now = time.monotonic()
        if now - self._last_look > 2 * STACK_SECONDS:
            self._awake_since = now  # this process itself was stopped, and perhaps the ranks with it
        self._last_look = now
        self.beats |= self._folder.beats()
        dead = {death.rank for death in self.deaths}
        ended = {rank: one.pid for rank, one in self._launcher.ranks.items() if rank not in dead and not is_alive(one)}
        if ended:
            codes = {rank: code_of_zombie(pid) for rank, pid in ended.items()}  # before their parent reaps them
            self.beats |= self._folder.beats()  # their last beats, written before they ended
            deaths = [self._death(rank, pid, codes[rank], now) for rank, pid in ended.items()]
            # Of deaths found together, those by a signal come first, but those by SIGTERM (from launchers) come last.
            deaths.sort(key=lambda death: (death.code == -signal.SIGTERM, death.code is None or death.code >= 0))
            self.deaths += deaths

    def first_failure(self) -> Death | None:
        """Return the first death that may leave other ranks waiting, or None."""
        failures = [death for death in self.deaths if death.is_failure]
        # Ranks that lost their connection to a rank that ran out of memory may have ended before it.
        return min(failures, key=lambda death: death.code != OUT_OF_MEMORY_EXIT_CODE, default=None)

    def all_ended(self, code: int | None = None) -> bool:
        """Return whether every rank has ended and, if a code is given, recorded that code."""
        ended = [death for death in self.deaths if code is None or (death.noted and death.code == code)]
        return 0 < len(self._launcher.ranks) == len(ended)

    def hung(self) -> list[Heartbeat]:
        """Return the last heartbeats of live ranks that are silent or stopped, once any heartbeat is overdue.

        The list is empty until a heartbeat is overdue. The most suspicious rank comes first: a stopped process, then
        the lowest step, then the oldest heartbeat.
        """
        now, host = time.monotonic(), socket.gethostname()
        beats = [  # by default from the launch's start, and never overdue
            self.beats.get(rank) or Heartbeat(rank, host, one.pid, NO_BEAT, -1, 0.0, self._started, math.inf)
            for rank, one in self._launcher.ranks.items()
            if is_alive(one)
        ]
        spent = {one.rank: (now - max(one.monotonic, self._awake_since)) / one.allowed_s for one in beats}
        if max(spent.values(), default=0.0) <= 1.0:
            return []
        silent = {rank for rank, share in spent.items() if share > SUSPECT_SHARE}
        stopped = {one.rank for one in beats if self.is_stopped(one.rank)}
        suspects = [one for one in beats if one.rank in silent | stopped or one.phase == NO_BEAT]
        return sorted(suspects, key=lambda one: (one.rank not in stopped, one.step, one.monotonic))

    def report_hang(self, hung: list[Heartbeat]) -> None:
        """Print to stderr which ranks are hung and for how long, with the Python stacks of their main threads."""
        now = time.monotonic()
        states = {beat.rank: self._state(beat.rank) for beat in hung}
        stacks = self._stacks(hung)
        for beat in hung:
            step = f", step {beat.step}" if beat.step >= 0 else ""
            waits = "" if beat is hung[0] else f"; it probably waits for rank {hung[0].rank}"
            print(
                f"rank {beat.rank} ({process_name(beat)}) hangs: no sign of life for {now - beat.monotonic:.0f} s "
                f"({beat.allowed_s:g} s allowed) in phase '{beat.phase}'{step}; process {states[beat.rank]}{waits}",
                file=sys.stderr,
            )
            print("\n".join(main_thread(stacks[beat.rank])) or "  (it printed no Python stack)", file=sys.stderr)

    def _stacks(self, hung: list[Heartbeat]) -> dict[int, str]:
        """Request the hung ranks' stacks; return what each rank writes within `STACK_SECONDS`."""
        before = {beat.rank: self._folder.stack(beat.rank) for beat in hung}
        asked = [rank for rank, text in before.items() if text is not None]  # SIGUSR2 would end the other ranks
        for rank in asked:
            send(self._launcher.ranks[rank], signal.SIGUSR2)
            send(self._launcher.ranks[rank], signal.SIGCONT)  # a stopped process receives signals once it continues
        deadline = time.monotonic() + STACK_SECONDS
        stacks: dict[int, str] = {}
        while time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            earlier, stacks = stacks, {rank: (self._folder.stack(rank) or "") for rank in asked}
            if earlier == stacks and all(stacks[rank] != before[rank] for rank in asked):
                break  # all have answered, and none is still writing
        return {beat.rank: stacks.get(beat.rank, "")[len(before[beat.rank] or "") :] for beat in hung}

    def is_stopped(self, rank: int) -> bool:
        """Return whether the rank's process is stopped."""
        return self._state(rank) in STOPPED

    def _state(self, rank: int) -> str:
        with contextlib.suppress(psutil.Error):
            return self._launcher.ranks[rank].status()
        return "gone"

    def _death(self, rank: int, pid: int, code: int | None, now: float) -> Death:
        beat = self.beats.get(rank)
        noted = beat is not None and beat.phase == ENDED
        place = process_name(beat) if beat else f"pid {pid}"
        return Death(rank, place, beat.exit_code if beat and noted else code, noted, now)


def process_name(beat: Heartbeat) -> str:
    """Return a rank's host and process ID, for messages."""
    return f"{beat.host}, pid {beat.pid}"


def how_it_ended(code: int | None) -> str:
    """Return how a process ended, from its exit code in Popen's or the shell's form."""
    if code is None:
        return "is gone"
    if code == OUT_OF_MEMORY_EXIT_CODE:
        return "ran out of memory"
    if code == FILE_SERVER_EXIT_CODE:
        return "temporarily could not read or write files"
    number = -code if code < 0 else code - 128
    if number > 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit code {code}"


def main_thread(dump: str) -> list[str]:
    """Return at most `STACK_LINES` lines of a faulthandler dump: the main thread, most recent call first.

    Faulthandler begins with the youngest thread, so the main thread comes last. The frames of Python's import system
    are left out, because each import adds five. In a deep stack, frames of installed libraries beyond the innermost
    `INNERMOST_LINES` are also left out.
    """
    blocks: list[list[str]] = []
    for line in dump.splitlines():
        if "(most recent call first)" in line:
            blocks.append([])
        elif blocks and line.startswith("  ") and not any(part in line for part in IMPORT_SYSTEM):
            blocks[-1].append(line)
    stack = blocks[-1] if blocks else []
    if len(stack) > STACK_LINES:
        stack = stack[:INNERMOST_LINES] + [line for line in stack[INNERMOST_LINES:] if "/site-packages/" not in line]
    return stack[:STACK_LINES]
