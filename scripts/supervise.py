"""Runs a launcher (deepspeed or torchrun) and stays in charge of every process that it starts.

    STOP_TIMEOUT=300 TORCH_EXTENSIONS_DIR=.venv/torch_extensions python scripts/supervise.py \\
        deepspeed --num_gpus 2 scripts/train_distributed.py --model-type mobilenet

launch_distributed.sh starts it so and explains the two variables.

What the launchers alone get wrong, each measured: SIGTERM to deepspeed reaches rank 1 up to 30 seconds after rank 0;
a launcher killed with -9 leaves its ranks running, and deepspeed then exits with 0; a lock left by a compile job that
was killed makes every later start wait for ever. So the launcher runs in a session of its own, where no Ctrl-C
reaches it, the ranks get the signals from here, all at once, and whatever is left at the end is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

MARK = "ZEROVISION_LAUNCH"  # in the environment of everything that one launch starts: survives re-parenting
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
POLL_SECONDS = 0.1
LEFTOVER_SECONDS = 5.0  # helpers such as multiprocessing's resource tracker need a moment to see their parent gone
REPEAT_SECONDS = 0.5  # `timeout` and terminals may deliver one wish to stop as two signals
KILL_SECONDS = 30.0  # a process the kernel does not let go of is no reason to wait for ever


class Launch:
    """All processes of one launch, found by the mark in their environment."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.signalled: set[psutil.Process] = set()

    def processes(self) -> dict[psutil.Process, bool]:
        """Return every live process of this launch, and whether it is a rank (not a launcher, not a rank's worker)."""
        found = {}
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if environment.get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found[process] = ("LOCAL_RANK" in environment, process.ppid())
            except psutil.Error:
                continue  # gone, or another user's
        inside_rank = {process.pid for process, (has_rank, _) in found.items() if has_rank}
        return {process: has_rank and parent not in inside_rank for process, (has_rank, parent) in found.items()}

    def ranks(self) -> list[psutil.Process]:
        """Return the live ranks."""
        return [process for process, is_rank in self.processes().items() if is_rank]

    def signal_ranks(self, number: int) -> int:
        """Send a signal to each rank that has not had one yet; return how many ranks live."""
        ranks = self.ranks()
        for rank in ranks:
            if rank not in self.signalled:
                self.signalled.add(rank)
                send(rank, number)
        return len(ranks)

    def stop(self, number: int, timeout_s: float) -> None:
        """Signal all ranks, give them `timeout_s` seconds to save and leave, and end what remains."""
        deadline = time.monotonic() + timeout_s
        while self.signal_ranks(number) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End every process of this launch at once."""
        deadline = time.monotonic() + KILL_SECONDS
        while (processes := self.processes()) and time.monotonic() < deadline:
            for process in processes:
                send(process, signal.SIGKILL)
            time.sleep(POLL_SECONDS)


def send(process: psutil.Process, number: int) -> None:
    """Send a signal to a process that may just have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def shell_exit_code(code: int) -> int:
    """Return the shell's 128 + n for an end by signal n, which Popen gives as -n and deepspeed as 256 - n."""
    if code < 0:
        return 128 - code
    return 128 + (256 - code) if code > 256 - 32 else code


def remove_stale_build_locks(folder: Path) -> None:
    """Remove the locks of compile jobs that no longer run; torch keeps a lock's file open while it compiles."""
    locks = {str(path) for path in folder.glob("**/lock")}
    for process in psutil.process_iter() if locks else ():
        try:
            locks -= {opened.path for opened in process.open_files()}
        except psutil.Error:
            continue
    for lock in locks:
        Path(lock).unlink(missing_ok=True)


def guard(launch: Launch, timeout_s: float) -> int:
    """Start a process that stops the ranks should this one be killed with -9; a byte on the returned pipe ends it."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(reading)
        return writing
    os.setsid()
    os.close(writing)
    if not os.read(reading, 1):
        launch.stop(signal.SIGTERM, timeout_s)
    os._exit(0)


def supervise(command: list[str], stop_timeout_s: float) -> int:
    """Run the command; return its exit code once no process of it is left.

    SIGINT, SIGTERM and SIGHUP (which the ranks get as SIGTERM) go to all ranks at once, a second SIGINT ends them.

    Args:
        command: the launcher and its arguments.
        stop_timeout_s: seconds the ranks have to save and leave after a signal.
    """
    launch = Launch()
    guard_pipe = guard(launch, stop_timeout_s)
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda given, _frame: received.append(given))
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    child = subprocess.Popen(command, env=environment | {MARK: launch.mark}, start_new_session=True)

    while child.poll() is None and not received:
        time.sleep(POLL_SECONDS)
    exit_code = stop(launch, child, received, stop_timeout_s) if child.poll() is None else child.returncode
    exit_code = shell_exit_code(exit_code)
    if launch.ranks():
        print("the launcher ended before its ranks: stopping them", file=sys.stderr)
        launch.stop(signal.SIGTERM, stop_timeout_s)
        exit_code = exit_code or 1
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while launch.processes() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    launch.kill()
    with contextlib.suppress(BrokenPipeError):
        os.write(guard_pipe, b"0")
    return exit_code


def stop(launch: Launch, child: subprocess.Popen, received: list[int], timeout_s: float) -> int:
    """Pass the received signal on to the ranks and wait for the launcher's own end; return its code as Popen does."""
    number = signal.SIGINT if received[0] == signal.SIGINT else signal.SIGTERM
    living = launch.signal_ranks(number)
    if not living:  # the launcher is still starting: there is nothing to save
        launch.kill()
        return -number
    print(f"{number.name}: {living} rank(s) save and stop; Ctrl-C ends them without", file=sys.stderr)
    time.sleep(REPEAT_SECONDS)
    received.clear()
    deadline = time.monotonic() + timeout_s
    while child.poll() is None:
        launch.signal_ranks(number)  # also one that the launcher had only just begun to start
        if time.monotonic() > deadline or signal.SIGINT in received:
            launch.kill()
        time.sleep(POLL_SECONDS)
    return child.returncode


if __name__ == "__main__":
    remove_stale_build_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    sys.exit(supervise(sys.argv[1:], float(os.environ["STOP_TIMEOUT"])))
