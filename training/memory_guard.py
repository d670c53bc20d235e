"""Steps that run out of memory on a rank: taken back on all ranks, which then stop together with the state before."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from training.errors import AgreedError
from training.out_of_memory import describe_failure, is_out_of_memory
from training.parallel.collectives import gather_objects
from training.parallel.exchange import optional, row_of, text, whole_number
from training.parallel.signals import FAILED, OUT_OF_MEMORY
from training.parallel.world import World

Result = TypeVar("Result")


class MemoryGuard:
    """Lets this rank take part in the steps that are left until all ranks have agreed to stop.

    Attributes:
        failed_step: the step of the epoch that ran out of memory here; None if none has.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.failed_step: int | None = None

    def attempt(self, step: int, action: Callable[[], Result], give_up: Callable[[], bool]) -> Result | None:
        """Return what `action` returns; None if it has run out of memory here, now or at an earlier attempt.

        Args:
            step: of the epoch.
            action: computes, and may have sent messages to the other ranks when it fails.
            give_up: does in its place what the other ranks wait for; returns False if that is not possible.

        Raises:
            Exception: that of `action`, if it is another one, or if `give_up` returns False.
        """
        if self.failed_step is None:
            try:
                return action()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error.with_traceback(None)  # whose frames hold what forward has kept
            self.failed_step = step
            print(f"{describe_failure(failure, self._world.rank)}: all ranks stop", file=sys.stderr, flush=True)
            return_freed_memory(self._world.device)
            if not give_up():
                raise failure
        else:
            give_up()
        return None

    def failure(self, data_error: Exception | None) -> int:
        """Return why this rank cannot go on, for `StopRequest.poll`; 0 if it can."""
        return OUT_OF_MEMORY if self.failed_step is not None else FAILED if data_error is not None else 0

    def settle(self, data_error: Exception | None) -> int | None:
        """Return the first step that has run out of memory on any rank, None if none has; a collective.

        Raises:
            UserError: on all ranks, that of the first rank that has one.
        """
        own = [str(data_error) if data_error else None, self.failed_step]
        rows = gather_objects(own, row_of(optional(text), optional(whole_number)), self._world)
        message = next((message for message, _ in rows if message is not None), None)
        if message is not None:
            raise AgreedError(message)
        return min((step for _, step in rows if step is not None), default=None)


def return_freed_memory(device: torch.device) -> None:
    """Give back what is free, so that saving has room: an allocator keeps what it might need again."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)
