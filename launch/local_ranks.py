"""Starts the ranks of one machine, each a process of its own, and ends them all when one fails.

    python launch/local_ranks.py --nproc_per_node 2 --master_port 29500 scripts/train_distributed.py --model-type vgg

It does what torchrun does without restarts, and sets the same variables, but does not import torch: the ranks start
at once (after about 5 seconds under deepspeed's launcher, 2 under torchrun).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.05
END_SECONDS = 30.0  # that the other ranks have to leave after SIGTERM, as under torchrun


def main(arguments: list[str]) -> int:
    """Start the ranks and wait for all; return the code of the first that failed, 128 + n for signal n, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nnodes", type=int, default=1, help="machines that start ranks")
    parser.add_argument("--node_rank", type=int, default=0, help="number of this machine among them, from 0")
    parser.add_argument("--nproc_per_node", type=int, required=True, help="ranks to start on this machine, as on each")
    parser.add_argument("--master_addr", default="127.0.0.1", help="address that the ranks meet on")
    parser.add_argument("--master_port", required=True, help="port that the ranks meet on")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the training entry and its arguments")
    given = parser.parse_args(arguments)
    ranks: list[subprocess.Popen] = []
    for local_rank in range(given.nproc_per_node):
        variables = rank_environment(local_rank, given.nproc_per_node, given.node_rank, given.nnodes)
        environment = os.environ | variables | {"MASTER_ADDR": given.master_addr, "MASTER_PORT": given.master_port}
        ranks.append(subprocess.Popen([sys.executable, "-u", *given.command], env=environment))
    # Only now: a signal before ends this process, and with it every rank (`HeartbeatWriter.end_with_parent`).
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda heard, _frame: _send(ranks, heard))
    return wait_for_all(ranks)


def rank_environment(local_rank: int, local_size: int, node_rank: int, nodes: int) -> dict[str, str]:
    """Return the variables of a rank; every machine has the same number of ranks."""
    return {
        "RANK": str(node_rank * local_size + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nodes * local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
    }


def wait_for_all(ranks: list[subprocess.Popen]) -> int:
    """Wait until every rank has ended, and end the others once one has failed; return the exit code (the shell's)."""
    first_failure, deadline = 0, 0.0
    while True:
        ends = [_end_of(rank) for rank in ranks]
        failures = [code for code in ends if code]
        if failures and not first_failure:
            first_failure, deadline = failures[0], time.monotonic() + END_SECONDS
            _send(ranks, signal.SIGTERM)
        if None not in ends:
            return first_failure
        if first_failure and time.monotonic() > deadline:
            _send(ranks, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _end_of(rank: subprocess.Popen) -> int | None:
    """Return a rank's exit code, 128 + n for signal n, None while it runs.

    An ended rank is not reaped: the supervisor reads the exit code of the zombie.
    """
    end = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status


def _send(ranks: list[subprocess.Popen], number: int) -> None:
    """Send a signal to every rank; one that has ended is a zombie until this process ends, so its pid is not reused."""
    for rank in ranks:
        os.kill(rank.pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
