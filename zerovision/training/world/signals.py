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

SAME_SIGNAL_SECONDS = 1.0  # what a terminal sends to all of its processes, launchers pass on once more
WAIT_POLL_SECONDS = 0.2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
FAILED = 1000  # no signal's number, and larger than any: a rank cannot continue, and the others stop with it


class StopDecision(NamedTuple):
    """What all ranks do next: the signal to stop for (0 for none, or `FAILED`), and whether to save."""

    stop_signal: int
    save_due: bool


class StopRequest:
    """Collects stop signals on every rank, and returns them on all ranks at the same poll.

    The agreement is one poll late: each poll starts a small all-reduce and reads the result of the one that the
    previous poll started, so nothing waits for it.
    """

    def __init__(self) -> None:
        self._signal_number = 0
        self._times: list[float] = []  # of the signals, by the monotonic clock
        self._most: int | None = None  # one more signal than so many ends the run at once
        self._is_alone, self._step = True, 0
        self._save_due = False
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def install(self) -> None:
        """Handle the stop signals in this process, if this thread can."""
        if can_handle_signals():
            for number in STOP_SIGNALS:
                signal.signal(number, self._remember)

    def request(self, signal_number: int) -> None:
        """Stop as if this signal had been received."""
        self._signal_number = self._signal_number or signal_number

    def request_save(self) -> None:
        """Request a save: after the next step on a single rank, or one step later on several ranks."""
        self._save_due = True

    def poll(self, world: World, *, failure: int = 0) -> StopDecision:
        """Return what any rank had received or requested by the previous poll, equal on all ranks; a collective.

        Args:
            world: the ranks.
            failure: why this rank cannot continue, `FAILED`; 0 if it can.
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
        """Return the signal that any rank has received so far; a collective that waits for the result."""
        earlier = self.poll(world).stop_signal
        return earlier or self.poll(world).stop_signal

    def wait(self, world: World, seconds: float, step: int, *, is_stopping: bool) -> bool:
        """Wait, by rank 0's clock, and return on all ranks whether a signal ended the wait; a collective.

        From this call on, one more signal ends the run at once. With several ranks, a rank that receives it ends its
        own process, because it cannot ask the others.

        Args:
            world: the ranks.
            seconds: seconds to wait.
            step: the run's step.
            is_stopping: whether a first signal caused the wait, so that only a second one ends it.
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
            if self._is_alone:  # the process may be a notebook's
                raise RunEnded(reason, 128 + signal_number, self._step)
            os.write(2, f"{reason}\n".encode())  # print could be what was interrupted
            os._exit(128 + signal_number)


def can_handle_signals() -> bool:
    """Whether this is the process's main thread, the only one in which Python sets signal handlers."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def handling_stop_signals(handler: Callable[[int, FrameType | None], object] | None = None) -> Iterator[None]:
    """Restore the handlers of the stop signals after the block; inside it, `handler` replaces them, if given."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS} if can_handle_signals() else {}
    try:
        for number in before if handler else ():
            signal.signal(number, handler)
        yield
    finally:
        for number, previous in before.items():
            with contextlib.suppress(TypeError):  # no handler of Python's
                signal.signal(number, previous)
