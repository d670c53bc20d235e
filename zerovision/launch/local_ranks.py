"""Starts the ranks of one machine by forking this process, and ends all of them if one fails.

    python -u zerovision/launch/local_ranks.py --nproc_per_node 2 --master_port 29500 ENTRY --model-type vgg

The ranks get the same environment variables as under torchrun. The modules in `--preload` are imported here, once for
all ranks. Under a supervisor (`launch.node_launcher`), this process survives a failure and, in a launch on one machine,
forks the ranks of the next start without importing the modules again. Nothing here may use CUDA, which does not survive
a fork.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import json
import math
import os
import runpy
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "ZEROVISION_LAUNCH_FOLDER"  # as in `zerovision.training.base.heartbeat`
CHANNEL_VARIABLE = "ZEROVISION_NODE_CHANNEL"  # a socket's descriptor: ranks and exit codes go out, orders come in
RANK_NAME = "rank "  # followed by the rank's number, the process name of a forked rank
LONGEST_ORDER = 2**21  # bytes
POLL_SECONDS = 0.05
END_SECONDS = 30.0  # time for the other ranks to exit after SIGTERM, as under torchrun


def main(arguments: list[str]) -> int:
    """Start the ranks and wait for them; return the exit code of the first failed rank (128 + n for signal n), or 0."""
    if sys.flags.safe_path:  # Python has not inserted this entry, which is replaced below
        sys.path.insert(0, str(Path(__file__).resolve().parent))
    descriptor = os.environ.pop(CHANNEL_VARIABLE, "")
    channel = socket.socket(fileno=int(descriptor)) if descriptor else None
    given = parse(arguments)
    import_ahead(given.preload)
    while True:
        ranks = [start_rank(given, local_rank, channel) for local_rank in range(given.nproc_per_node)]
        report(channel, ranks={given.node_rank * len(ranks) + local_rank: pid for local_rank, pid in enumerate(ranks)})
        # Forward signals only from here on: until now, a signal ends this process, and every rank with it
        # (`heartbeat.end_with_parent`).
        with passing_signals_on(ranks):
            code = wait_for_all(ranks, channel, given.stop_timeout)
        report(channel, code=code)
        order = next_order(channel)
        if order is None:
            return code
        for pid in ranks:
            os.waitpid(pid, 0)
        given = parse(order["arguments"])
        os.environ.update(order["environment"])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nnodes", type=int, default=1, help="number of machines that start ranks")
    parser.add_argument("--node_rank", type=int, default=0, help="index of this machine, from 0")
    parser.add_argument("--nproc_per_node", type=int, required=True, help="number of ranks to start on each machine")
    parser.add_argument("--master_addr", default="127.0.0.1", help="address that the ranks connect to")
    parser.add_argument("--master_port", required=True, help="port that the ranks connect to")
    parser.add_argument("--preload", default="", help="modules to import before the ranks start, separated by commas")
    timeout_help = "seconds that the ranks have to save and exit if the supervisor dies"
    parser.add_argument("--stop_timeout", type=float, default=END_SECONDS, help=timeout_help)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the training entry point and its arguments")
    return parser.parse_args(arguments)


def import_ahead(names: str) -> None:
    """Import modules (separated by commas) for all ranks, which report any module that cannot be imported."""
    if not names:
        return
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    before = dict(os.environ)
    # Keep libraries that look for GPUs from initializing CUDA, as they may do without NVML.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("DS_ACCELERATOR", "cuda")
    gc.disable()  # collection would take a fifth of the time and find nothing
    for name in names.split(","):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # keeps the ranks' collectors from touching, and thus copying, shared memory
    gc.enable()
    atexit.register(gc.unfreeze)
    for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", "DS_ACCELERATOR"):
        if name not in before:
            del os.environ[name]


def start_rank(given: argparse.Namespace, local_rank: int, channel: socket.socket | None) -> int:
    """Run the command as a rank in a fork of this process; return the fork's process ID."""
    if pid := os.fork():
        return pid
    if channel is not None:
        channel.close()  # only the parent communicates with the supervisor
    place = {  # every machine has the same number of ranks
        "RANK": str(given.node_rank * given.nproc_per_node + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(given.nnodes * given.nproc_per_node),
        "LOCAL_WORLD_SIZE": str(given.nproc_per_node),
    }
    # /proc shows the launcher's command and variables, so this name identifies a rank to the supervisor and `top`.
    Path("/proc/self/comm").write_text(f"{RANK_NAME}{place['RANK']}")
    os.environ.update(place, MASTER_ADDR=given.master_addr, MASTER_PORT=given.master_port)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():  # a preloaded module has used CUDA
        os.execv(sys.executable, [sys.executable, "-u", *given.command])
    sys.argv = given.command
    sys.path[0] = str(Path(given.command[0]).resolve().parent)
    runpy.run_path(given.command[0], run_name="__main__")
    sys.exit(0)


def report(channel: socket.socket | None, **message: object) -> None:
    """Send the supervisor a message, if there is a supervisor."""
    if channel is not None:
        with contextlib.suppress(OSError):  # the supervisor is gone
            channel.send(json.dumps(message).encode())


def next_order(channel: socket.socket | None) -> dict[str, Any] | None:
    """Return the arguments and changed variables of the next start, or None if there is no next start."""
    if channel is not None:
        with contextlib.suppress(OSError):
            if order := channel.recv(LONGEST_ORDER):
                return json.loads(order)
    return None


def is_closed(channel: socket.socket | None) -> bool:
    """Return whether the supervisor is gone; a supervisor sends nothing while ranks run."""
    if channel is None:
        return False
    try:
        return not channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def passing_signals_on(ranks: list[int]) -> Iterator[None]:
    """Forward SIGTERM and SIGINT to the ranks, unless this process ignores them."""
    heard = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda given, _frame: _send(ranks, given)) for number in heard}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def wait_for_all(ranks: list[int], channel: socket.socket | None, stop_timeout_s: float) -> int:
    """Wait until every rank has ended; return the first failed rank's exit code in the shell's form, or 0.

    If a rank fails, the others are stopped. If the supervisor dies, all ranks are stopped, and the launch's folder is
    removed here instead of by the supervisor.
    """
    first_failure, deadline, is_orphaned = 0, math.inf, False
    while True:
        ends = [_end_of(rank) for rank in ranks]
        failures = [code for code in ends if code]
        if failures and not first_failure:
            first_failure, deadline = failures[0], min(deadline, time.monotonic() + END_SECONDS)
            _send(ranks, signal.SIGTERM)
        elif not is_orphaned and is_closed(channel):
            is_orphaned, deadline = True, min(deadline, time.monotonic() + stop_timeout_s)
            _send(ranks, signal.SIGTERM)
        if None not in ends:
            if is_orphaned:
                shutil.rmtree(os.environ.get(FOLDER_VARIABLE, ""), ignore_errors=True)
            return first_failure
        if time.monotonic() > deadline:
            _send(ranks, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _end_of(rank: int) -> int | None:
    """Return a rank's exit code (128 + n for signal n), or None while the rank runs."""
    end = os.waitid(os.P_PID, rank, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # not reaped: the supervisor reads it too
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status


def _send(ranks: list[int], number: int) -> None:
    """Signal every rank; a rank that has exited stays a zombie until the next start, so its pid is not reused."""
    for rank in ranks:
        os.kill(rank, number)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # ranks exit in `start_rank`; this process has nothing to clean up
