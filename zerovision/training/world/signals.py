"""Handles SIGINT, SIGTERM and SIGUSR1: a handler only sets a flag, and all ranks agree to stop or to save."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerovision.training.base.errors import RunEnded
from zerovision.training.base.timing import communication
from zerovision.training.world.world import World

SAME_SIGNAL_SECONDS = 1.0  # launchers forward a signal that the terminal has already sent to all processes
WAIT_POLL_SECONDS = 0.2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
FAILED = 1000  # larger than any signal's number; means that a rank cannot continue, so all ranks stop


class StopDecision(NamedTuple):
    """The decision of all ranks: the signal to stop for (0 for none, or `FAILED`), and whether to save."""

    stop_signal: int
    save_due: bool


class StopRequest:
    """Collects stop signals on every rank, and reports them to all ranks at the same poll.

    Each poll starts a small all-reduce, and returns the result of the all-reduce that the previous poll started. Ranks
    therefore learn of a signal one poll later, but never wait for the all-reduce.
    """

    def __init__(self) -> None:
        self._signal_number = 0
        self._times: list[float] = []  # when signals arrived, by the monotonic clock
        self._most: int | None = None  # if more signals than this arrive, the run ends immediately
        self._is_alone, self._step = True, 0
        self._save_due = False
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def install(self) -> None:
        """Install handlers for the stop signals, if this is the main thread."""
        if can_handle_signals():
            for number in STOP_SIGNALS:
                signal.signal(number, self._remember)

    def request(self, signal_number: int) -> None:
        """Request a stop, as if this signal had been received."""
        self._signal_number = self._signal_number or signal_number

    def request_save(self) -> None:
        """Request a save: after the next step on a single rank, or one step later on several ranks."""
        self._save_due = True

    def poll(self, world: World, *, failure: int = 0) -> StopDecision:
        """Return, on all ranks, what any rank had received or requested by the previous poll; a collective.

        Args:
            world: the ranks.
            failure: `FAILED` if this rank cannot continue, otherwise 0.
        """
        number, save_due, self._save_due = failure or self._signal_number, self._save_due, False
        if world.signal_group is None:
            return StopDecision(number, save_due)
        agreed = self.close()
        flags = torch.tensor([number, save_due], dtype=torch.int32)
        with communication():
            work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=world.signal_group, async_op=True)
        self._pending = (work, flags)
        return agreed

    def poll_now(self, world: World) -> int:
        """Return the signal that any rank has received, or 0; a collective that waits for the result."""
        return self.poll(world).stop_signal or self.poll(world).stop_signal  # the second returns the first's result

    def wait(self, world: World, seconds: float, step: int, *, is_stopping: bool) -> bool:
        """Wait as measured by rank 0's clock, and return, on all ranks, whether a signal ended the wait; a collective.

        Once a signal has ended the wait, the next signal ends the run immediately. With several ranks, a rank that
        receives that signal ends its own process, because it cannot consult the other ranks.

        Args:
            world: the ranks.
            seconds: number of seconds to wait.
            step: the run's current step.
            is_stopping: whether a signal caused the wait, so that only a second signal ends the wait.
        """
        if self._most is None:
            self._most = 1 + (len(self._times) if is_stopping else 0)
        self._is_alone, self._step = world.size == 1, step
        deadline = time.monotonic() + seconds
        while True:
            is_over = world.is_main and time.monotonic() >= deadline
            flags = torch.tensor([len(self._times) >= self._most, is_over], dtype=torch.int32)
            if world.signal_group is not None:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=world.signal_group)
            has_signal, is_over = flags.tolist()
            if has_signal or is_over:
                return bool(has_signal)
            time.sleep(min(WAIT_POLL_SECONDS, max(deadline - time.monotonic(), 0.0)))

    def close(self) -> StopDecision:
        """Finish the pending all-reduce, and return its result; a collective."""
        if self._pending is None:
            return StopDecision(0, False)
        work, flags = self._pending
        with communication():
            work.wait()
        self._pending = None
        stop_signal, save_due = flags.tolist()  # on the CPU: no device sync
        return StopDecision(stop_signal, bool(save_due))

    def _remember(self, signal_number: int, _frame: FrameType | None) -> None:
        self._signal_number = self._signal_number or signal_number
        now = time.monotonic()
        if self._times and now - self._times[-1] < SAME_SIGNAL_SECONDS:
            return
        self._times.append(now)
        if self._most is not None and len(self._times) > self._most:
            reason = "a second signal: ended without saving"
            if self._is_alone:  # this may be the process of a notebook
                raise RunEnded(reason, 128 + signal_number, self._step)
            os.write(2, f"{reason}\n".encode())  # the signal may have interrupted a print
            os._exit(128 + signal_number)


def can_handle_signals() -> bool:
    """Return whether this is the main thread, the only thread in which Python can set signal handlers."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def handling_stop_signals(handler: Callable[[int, FrameType | None], object] | None = None) -> Iterator[None]:
    """Restore the handlers of the stop signals after the block; inside the block, use `handler` if it is given."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS} if can_handle_signals() else {}
    try:
        for number in before if handler else ():
            signal.signal(number, handler)
        yield
    finally:
        for number, previous in before.items():
            with contextlib.suppress(TypeError):  # the handler was not installed from Python
                signal.signal(number, previous)
