"""Time from typing the command to the first finished optimizer step: ours against bare scripts, in one run.

    python benchmarks/startup.py --rounds 5
    python benchmarks/startup.py --rounds 5 --ranks 8 --only ours

CPU ranks (GPUs where there are some), MobileNetV3-Small, made-up images of 32 pixels, 16 a rank. The bare scripts are
benchmarks/bare_start.py under torchrun with DistributedDataParallel, and under torchrun and deepspeed's launcher with
DeepSpeed ZeRO 1. Every variant runs in every round, in shuffled order, after one round that warms up; a ratio is taken
within each round. Then rank 0 is killed with -9, and the time until the restarted ranks have made their first step is
taken too (deepspeed's launcher by itself has no restarts). Of ours, rank 0's signs of life in the launch folder say
when each phase began.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zerovision.launch.launch_folder import HeartbeatFolder

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
BARE = str(ROOT / "benchmarks" / "bare_start.py")
BASELINE = "torchrun, DDP"
TORCHRUN = [str(BIN / "torchrun"), "--nproc_per_node={ranks}", "--master_port={port}", "--max-restarts=1"]
RESTART = "after a restart"
CPU = "CPU time of all processes to the first step"  # much the same whatever else runs on the machine
BARE_COMMANDS = {
    BASELINE: [*TORCHRUN, BARE, "ddp"],
    "torchrun, DeepSpeed": [*TORCHRUN, BARE, "deepspeed"],
    "deepspeed, DeepSpeed": [str(BIN / "deepspeed"), "--num_gpus={ranks}", "--master_port={port}", BARE, "deepspeed"],
}
OURS = "ours"
# The phase of rank 0's beats -> what ended when it began.
PHASES = {"start-up": "launcher and imports", "first step": "model, engine, data", "step": "first step"}
FIRST_STEP = PHASES["step"]
POLL_SECONDS = 0.005
SETTLE_SECONDS = 1.0  # that the other ranks have to end their first step, before rank 0 is killed
LIMIT_SECONDS = 150.0


def environment(**changes: str) -> dict[str, str]:
    """Return this environment with this Python's tools first and one thread per rank."""
    return os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"} | changes


def cpu_seconds(pid: int) -> float:
    """Return the CPU time so far of a process and all that it has started, in seconds."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in [root, *root.children(recursive=True)]]
    return sum(one.user + one.system + one.children_user + one.children_system for one in times)


def bare_seconds(command: list[str]) -> dict[str, float]:
    """Run a bare script; return the seconds until its first step is done, and, killed then, until it is once more."""
    ends: dict[str, float] = {}
    began = time.time()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    ) as run:
        assert run.stdout
        limit = threading.Timer(LIMIT_SECONDS, run.terminate)
        limit.start()
        for line in run.stdout:
            if found := re.search(r"first step done by (\d+)", line):
                ends[RESTART if ends else FIRST_STEP] = time.time() - began
                ends.setdefault(CPU, cpu_seconds(run.pid))
                if RESTART not in ends and "--max-restarts=1" in command:
                    time.sleep(SETTLE_SECONDS)
                    began = time.time()
                    os.kill(int(found[1]), signal.SIGKILL)
                else:
                    run.terminate()
        limit.cancel()
    if not ends:
        raise RuntimeError(f"{' '.join(command)} made no step")
    return ends


def our_seconds(ranks: int, model: str) -> dict[str, float]:
    """Run our launcher up to rank 0's first step, kill that and wait for its next; return the seconds to all ends."""
    with tempfile.TemporaryDirectory() as folder:
        words = [model, "ddp", str(ranks), "16", "9", "--data", "fake", "--tensorboard", "false", "--log-dir", folder]
        command = ["bash", str(ROOT / "scripts" / "launch_distributed.sh"), *words]
        ends: dict[str, float] = {}
        began, killed = time.time(), 0
        run = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(TMPDIR=folder),
        )
        while RESTART not in ends:
            if run.poll() is not None or time.time() - began > LIMIT_SECONDS:
                run.kill()
                raise RuntimeError(f"{' '.join(command)} made no step")
            for path in Path(folder).glob("zerovision-*"):
                beat = HeartbeatFolder(path).beats().get(0)
                if beat and not killed and beat.phase in PHASES:
                    ends.setdefault(PHASES[beat.phase], beat.time - began)
                if beat and beat.phase == "step" and beat.pid != killed:
                    if killed:
                        ends[RESTART] = beat.time - began
                    else:
                        ends[CPU] = cpu_seconds(run.pid)
                        time.sleep(SETTLE_SECONDS)
                        killed, began = beat.pid, time.time()
                        os.kill(killed, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        run.send_signal(signal.SIGTERM)  # it saves and stops
        run.wait()
    return ends


def measure(
    rounds: int, ranks: int, model: str, first_port: int, names: list[str]
) -> dict[str, list[dict[str, float]]]:
    """Return the seconds to the ends of its phases of every variant, by round."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    shuffle = random.Random(0)
    for number in range(rounds + 1):
        for place, name in enumerate(shuffle.sample(names, len(names))):
            if name == OURS:
                ends = our_seconds(ranks, model)
            else:
                port = first_port + len(names) * number + place
                ends = bare_seconds([word.format(port=port, ranks=ranks) for word in BARE_COMMANDS[name]])
            if number:  # the first round reads everything from disk
                taken[name].append(ends)
        said = "  ".join(f"{name} {ends[-1][FIRST_STEP]:.1f}" for name, ends in taken.items() if ends)
        print(f"round {number}: {said or 'warmed up'}", flush=True)
    return taken


def print_tables(taken: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians, the ratios within each round, and where our time goes, as Markdown."""
    print(f"\n| | seconds, median (least - most) | ratio to {BASELINE} |\n|---|---|---|")
    for end in (FIRST_STEP, RESTART, CPU):
        for name, rounds in taken.items():
            both = zip(rounds, taken[BASELINE], strict=True)
            if ratios := [own[end] / base[end] for own, base in both if end in own and end in base]:
                values = [ends[end] for ends in rounds if end in ends]
                spread = f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"
                print(f"| {name}, {end} | {spread} | {statistics.median(ratios):.2f} |")
    if OURS not in taken:
        return
    print(f"\n| {OURS}, seconds spent in | |\n|---|---|")
    before = None
    for phase in PHASES.values():
        spent = statistics.median(ends[phase] - (ends[before] if before else 0) for ends in taken[OURS])
        print(f"| {phase} | {spent:.2f} |")
        before = phase


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*BARE_COMMANDS, OURS]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help=f"besides {BASELINE}")
    parser.add_argument("--model", default="mobilenet")
    parser.add_argument("--first-port", type=int, default=29700)
    given = parser.parse_args()
    chosen = [name for name in names if name == BASELINE or name in given.only]
    print_tables(measure(given.rounds, given.ranks, given.model, given.first_port, chosen))


if __name__ == "__main__":
    main()
