"""SIGINT, SIGTERM, SIGUSR1: a handler that only sets a flag, and the ranks' agreement on when to stop or save."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from training.observe.timing import communication
from training.parallel.world import World

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
FAILED = 1000  # no signal's number: a rank cannot go on, and the others shall stop with it


class Verdict(NamedTuple):
    """What all ranks agreed on: the signal to stop by (0 for none, `FAILED`), and whether to save a checkpoint."""

    stop_signal: int
    save_due: bool


class StopRequest:
    """Collects stop signals on every rank, and tells all ranks of it at the same poll.

    The agreement travels one poll behind: each poll starts a tiny all-reduce and reads the one that the previous
    poll started, so it costs no waiting.
    """

    def __init__(self) -> None:
        self._signal_number = 0
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def install(self) -> None:
        """Take over the stop signals for this process."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)

    def poll(self, world: World, *, failed: bool = False, save_due: bool = False) -> Verdict:
        """Return what any rank had received, or asked for, by the previous poll.

        A collective: every rank calls it the same number of times, and all get the same answer.

        Args:
            world: the ranks.
            failed: whether this rank cannot go on.
            save_due: whether this rank wants a checkpoint.
        """
        number = FAILED if failed else self._signal_number
        if world.signal_group is None:
            return Verdict(number, save_due)
        agreed = self._finish()
        flags = torch.tensor([number, save_due], dtype=torch.int32)
        with communication():
            work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=world.signal_group, async_op=True)
        self._pending = (work, flags)
        return agreed

    def poll_now(self, world: World) -> int:
        """Return the signal that any rank has received by now, and wait for the answer; a collective."""
        earlier = self.poll(world).stop_signal
        return earlier or self.poll(world).stop_signal

    def close(self) -> None:
        """Finish the all-reduce still under way; a collective."""
        self._finish()

    def _finish(self) -> Verdict:
        if self._pending is None:
            return Verdict(0, False)
        work, flags = self._pending
        with communication():
            work.wait()
        self._pending = None
        stop_signal, save_due = flags.tolist()  # on the CPU: no device sync
        return Verdict(stop_signal, bool(save_due))

    def _remember(self, signal_number: int, _frame: FrameType | None) -> None:
        self._signal_number = self._signal_number or signal_number


def exit_code_of(signal_number: int) -> int:
    """The shell's convention for an end by signal: 130 for SIGINT, 138 for SIGUSR1, 143 for SIGTERM."""
    return 128 + signal_number
