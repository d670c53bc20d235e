"""Lets training and evaluation run inside a user's Python process, such as a notebook, without changing it."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist

from zerovision.training.base.errors import UserError
from zerovision.training.world.signals import handling_stop_signals
from zerovision.training.world.world import stop_world

FLAGS = (
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.utils.deterministic, "fill_uninitialized_memory"),
)
# The process group, environment and settings belong to the process, so only one run at a time may use them.
_IN_USE = threading.RLock()
_GENERATORS = threading.RLock()  # without a lock, one thread could undo the draws of another


@contextmanager
def preserved_process() -> Iterator[None]:
    """Restore what a run changes in its process, unless a launcher started the process; also works as a decorator.

    This restores signal handlers, the exception hook, the environment, the CPU's random generators and PyTorch's global
    settings, and destroys the process group. A process that a launcher started belongs to the run, whose handlers must
    receive signals even after the run has ended. If another thread is training or evaluating, this thread waits.

    Raises:
        UserError: if the process already has a process group.
    """
    if not _IN_USE.acquire(blocking=False):
        print("note: another thread of this process trains or evaluates: waiting for it to end", file=sys.stderr)
        _IN_USE.acquire()
    try:
        with nullcontext() if "RANK" in os.environ else _restored_process():
            yield
    finally:
        _IN_USE.release()


@contextmanager
def _restored_process() -> Iterator[None]:
    if dist.is_initialized():
        raise UserError("this process has a process group: call torch.distributed.destroy_process_group() first.")
    with ExitStack() as at_end:  # the last callback is called first
        at_end.callback(os.environ.update, dict(os.environ))
        at_end.callback(os.environ.clear)
        at_end.callback(setattr, sys, "excepthook", sys.excepthook)  # that of init_process_group adds [rank0] to lines
        at_end.callback(stop_world)
        with _restored_generators(), preserved_torch_settings(), handling_stop_signals():
            yield


@contextmanager
def preserved_torch_settings() -> Iterator[None]:
    """Restore PyTorch's global settings when the block ends."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as at_end:
        at_end.callback(torch.set_num_threads, torch.get_num_threads())
        at_end.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
        for owner, name in FLAGS:
            at_end.callback(setattr, owner, name, getattr(owner, name))
        yield


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the CPU random generators of Python, NumPy and torch when the block ends; threads take turns."""
    with _GENERATORS, _restored_generators():
        yield


@contextmanager
def _restored_generators() -> Iterator[None]:
    with ExitStack() as at_end:
        at_end.callback(random.setstate, random.getstate())
        at_end.callback(np.random.set_state, np.random.get_state())
        at_end.callback(torch.set_rng_state, torch.get_rng_state())
        yield
