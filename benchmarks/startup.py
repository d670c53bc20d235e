"""Time from typing the command to the first finished optimizer step: ours against bare scripts, in one run.

    python benchmarks/startup.py --rounds 5

Two CPU ranks (two GPUs where there are some), MobileNetV3-Small, made-up images of 32 pixels, 16 a rank. The bare
scripts are benchmarks/bare_start.py under torchrun with DistributedDataParallel, and under torchrun and deepspeed's
launcher with DeepSpeed ZeRO 1. Every variant runs in every round, in shuffled order, after one round that warms up; a
ratio is taken within each round. Of ours, rank 0's signs of life in the launch folder say when each phase began.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.heartbeat_reader import HeartbeatFolder

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
BARE = str(ROOT / "benchmarks" / "bare_start.py")
BASELINE = "torchrun, DDP"
BARE_COMMANDS = {
    BASELINE: [str(BIN / "torchrun"), "--nproc_per_node=2", "--master_port={port}", BARE, "ddp"],
    "torchrun, DeepSpeed": [str(BIN / "torchrun"), "--nproc_per_node=2", "--master_port={port}", BARE, "deepspeed"],
    "deepspeed, DeepSpeed": [str(BIN / "deepspeed"), "--num_gpus=2", "--master_port={port}", BARE, "deepspeed"],
}
OURS = {f"ours, LAUNCHER={name}": name for name in ("direct", "torchrun", "deepspeed")}
# The phase of rank 0's beats -> what ended when it began.
PHASES = {"import": "launcher", "start-up": "imports", "first step": "model, engine, data", "step": "first step"}
POLL_SECONDS = 0.005
LIMIT_SECONDS = 300.0


def environment(**changes: str) -> dict[str, str]:
    """Return this environment with this Python's tools first and one thread per rank."""
    return os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"} | changes


def bare_seconds(words: list[str], port: int) -> float:
    """Run a bare script; return the seconds until it says that its first step is done."""
    command = [word.format(port=port) for word in words]
    began = time.time()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    ) as run:
        assert run.stdout
        seconds = next((time.time() - began for line in run.stdout if "first step done" in line), None)
        run.stdout.read()
    if seconds is None:
        raise RuntimeError(f"{' '.join(command)} made no step")
    return seconds


def our_phases(launcher: str, model: str) -> dict[str, float]:
    """Run our launcher up to rank 0's first step; return the seconds from the start to the end of each phase."""
    with tempfile.TemporaryDirectory() as folder:
        words = [model, "ddp", "2", "16", "1", "--data", "fake", "--tensorboard", "false", "--log-dir", folder]
        command = ["bash", str(ROOT / "scripts" / "launch_distributed.sh"), *words]
        ends: dict[str, float] = {}
        began = time.time()
        run = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(LAUNCHER=launcher, TMPDIR=folder),
        )
        while PHASES["step"] not in ends:
            if run.poll() is not None or time.time() - began > LIMIT_SECONDS:
                run.kill()
                raise RuntimeError(f"{' '.join(command)} made no step")
            for path in Path(folder).glob("zerovision-*"):
                beat = HeartbeatFolder(path).beats().get(0)
                if beat and beat.phase in PHASES:
                    ends.setdefault(PHASES[beat.phase], beat.time - began)
            time.sleep(POLL_SECONDS)
        run.send_signal(signal.SIGTERM)  # it saves and stops
        run.wait()
    return ends


def measure(
    rounds: int, model: str, first_port: int
) -> tuple[dict[str, list[float]], dict[str, list[dict[str, float]]]]:
    """Return the seconds of every variant by round, and the phases of ours."""
    seconds: dict[str, list[float]] = {name: [] for name in [*BARE_COMMANDS, *OURS]}
    phases: dict[str, list[dict[str, float]]] = {name: [] for name in OURS}
    shuffle = random.Random(0)
    for number in range(rounds + 1):
        for place, name in enumerate(shuffle.sample(list(seconds), len(seconds))):
            if name in OURS:
                ends = our_phases(OURS[name], model)
                taken = ends[PHASES["step"]]
            else:
                taken = bare_seconds(BARE_COMMANDS[name], first_port + len(seconds) * number + place)
            if number:  # the first round reads everything from disk
                seconds[name].append(taken)
                if name in OURS:
                    phases[name].append(ends)
        said = "  ".join(f"{name} {values[-1]:.1f}" for name, values in seconds.items() if values)
        print(f"round {number}: {said or 'warmed up'}", flush=True)
    return seconds, phases


def print_tables(seconds: dict[str, list[float]], phases: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians, the ratios within each round, and where our time goes, as Markdown."""
    print(f"\n| | seconds, median (least - most) | ratio to {BASELINE} |\n|---|---|---|")
    for name, values in seconds.items():
        ratio = statistics.median(own / base for own, base in zip(values, seconds[BASELINE], strict=True))
        print(f"| {name} | {statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f}) | {ratio:.2f} |")
    print(f"\n| seconds spent in | {' | '.join(OURS)} |\n|---|{'---|' * len(OURS)}")
    before = None
    for phase in PHASES.values():
        spent = [statistics.median(ends[phase] - (ends[before] if before else 0) for ends in phases[n]) for n in OURS]
        print(f"| {phase} | {' | '.join(f'{value:.2f}' for value in spent)} |")
        before = phase


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="mobilenet")
    parser.add_argument("--first-port", type=int, default=29700)
    given = parser.parse_args()
    print_tables(*measure(given.rounds, given.model, given.first_port))


if __name__ == "__main__":
    main()
