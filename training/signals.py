"""SIGINT and SIGTERM: a handler that only sets a flag, and the ranks' agreement on when to stop."""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist

from training.distributed import World

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
FAILED = 1000  # no signal's number: a rank cannot go on, and the others shall stop with it


class StopRequest:
    """Collects stop signals on every rank, and tells all ranks of it at the same poll.

    The agreement travels one poll behind: each poll starts a tiny all-reduce and reads the one that the previous
    poll started, so it costs no waiting.
    """

    def __init__(self) -> None:
        self._signal_number = 0
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def install(self) -> None:
        """Take over SIGINT and SIGTERM for this process."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)

    def poll(self, world: World, *, failed: bool = False) -> int:
        """Return the signal that any rank had received by the previous poll, 0 for none, `FAILED` for a failed rank.

        A collective: every rank calls it the same number of times, and all get the same answer.
        """
        number = FAILED if failed else self._signal_number
        if world.signal_group is None:
            return number
        agreed = self._finish()
        flag = torch.tensor([number], dtype=torch.int32)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=world.signal_group, async_op=True)
        self._pending = (work, flag)
        return agreed

    def close(self) -> None:
        """Finish the all-reduce still under way; a collective."""
        self._finish()

    def _finish(self) -> int:
        if self._pending is None:
            return 0
        work, flag = self._pending
        work.wait()
        self._pending = None
        return int(flag.item())  # on the CPU: no device sync

    def _remember(self, signal_number: int, _frame: FrameType | None) -> None:
        self._signal_number = self._signal_number or signal_number


def exit_code_of(signal_number: int) -> int:
    """The shell's convention for an end by signal: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signal_number
