"""Starts worker processes that neither hang at the start nor die of a signal that was meant for the trainer.

They are started with `forkserver`: a plain fork copies the locks of the threads that gloo, NCCL and CUDA run in the
parent, and can hang for ever. The fork server has torch imported once, so that each worker starts in a moment. Workers
are deaf to SIGINT and SIGTERM: a launcher sends those to every process, and the trainer still needs its data to finish
the step and save. They end when the process that started them dies.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

# Installed packages only: Python 3.11's fork server does not know the paths that a script added.
_PRELOADED_MODULES = ["torch", "torchvision.transforms.v2", "PIL.Image"]
_SIGNALS_FOR_THE_TRAINER = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


def worker_context() -> ForkServerContext:
    """Return the multiprocessing context of all our workers; its fork server starts now, beside what follows here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED_MODULES)
    resource_tracker.ensure_running()  # it unblocks SIGINT and SIGTERM when it starts, so it must start first
    # the fork server and its workers inherit the mask and keep it for life
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_FOR_THE_TRAINER)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return context


def end_with_parent(worker_id: int) -> None:
    """Make this worker process end when its parent dies; a `worker_init_fn` of DataLoader.

    DataLoader's own watch compares parent process ids, and the parent of a forked-off worker is the fork server, which
    waits for its workers: killing the trainer alone would leave all of them behind.
    """
    threading.Thread(target=_end_after_parent, daemon=True).start()


def _end_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
