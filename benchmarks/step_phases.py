"""Measures the steps and messages that `planning/` predicts: on 1, 2 and 4 CPU ranks, and between two machines.

    python benchmarks/step_phases.py                                      # some 15 minutes on a quiet machine, as root
    python benchmarks/step_phases.py --models basic_cnn --mbit "" --out /tmp/steps.jsonl

It writes a line for each measured block of steps, and each train of messages, into step_phases.jsonl, in place of the
lines of the same case. `ledger.py`, `predicted_steps.py` and `fit_step_time.py` read them: a case's seconds are the
medians of its blocks. Jobs of 1, 2 and 4 ranks take turns. Two machines are network namespaces, see `exchange.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.exchange import on_two_hosts, two_hosts
from benchmarks.launch import torchrun
from training.parallel.build_engine import ENGINES
from training.parallel.strategies import STRATEGIES

PHASES = Path(__file__).with_name("step_phases.jsonl")
CORES = 2  # of the machine that was measured
BATCH = 16
GUIDE, HEAVY = ("basic_cnn", "mobilenet", "efficientnet", "cnn_lstm"), ("vgg", "ensemble")
IMAGE_SIZES = (32, 64)
# The networks, with images of a rank, to which what ranks cost each other is fitted; those of the guide confirm it.
FITTED = {
    "timm:resnet18": 16,
    "timm:mobilenetv2_100": 32,
    "timm:vit_tiny_patch16_224": 16,
    "timm:efficientnet_lite0": 16,
    "timm:convnext_atto": 16,
}
# More networks, with images and pixels, on one core: to them and to those above the roofline is fitted.
ALONE = (
    ("timm:resnet18", 8, 128),
    ("timm:resnet50", 8, 64),
    ("timm:mobilenetv3_large_100", 16, 96),
    ("timm:regnety_002", 16, 64),
    ("timm:ghostnet_100", 16, 64),
    ("timm:vgg11_bn", 8, 64),
    ("timm:densenet121", 8, 64),
    ("timm:mnasnet_100", 8, 128),
    ("timm:vit_small_patch16_224", 8, 64),
    ("mobilenet", 64, 64),
    ("mobilenet", 8, 128),
    ("basic_cnn", 64, 32),
    ("cnn_lstm", 32, 64),
    ("efficientnet", 8, 128),
)
OTHER_ENGINES = ("mobilenet", "cnn_lstm", "timm:resnet18", "timm:vit_tiny_patch16_224")
BETWEEN = (("native", "ddp"), ("torch", "ddp"), ("torch", "fsdp_stage3"), ("deepspeed", "fsdp_stage2"))
MODELS = tuple(dict.fromkeys((*GUIDE, *HEAVY, *FITTED, *(model for model, *_ in ALONE))))
WAYS = ((1, 1), (1, CORES), (2, 1), (4, 1))  # ranks, and threads of each
SLOW_MBIT = 10  # a step takes seconds: one is enough


@dataclass(frozen=True)
class Case:
    """A step of one rank of a job.

    Attributes:
        ranks: of the job.
        threads: of a rank.
        model: as `--model-type`, for `ledger_rank.CLASSES` classes.
        batch_size: images of a rank.
        image_size: pixels.
        engine: 'native', 'torch' or 'deepspeed'.
        strategy: as `--strategy`.
        mbit: Mbit/s of the wire between two machines with a rank each; 0 on one machine.
    """

    ranks: int
    threads: int
    model: str
    batch_size: int
    image_size: int
    engine: str = "native"
    strategy: str = "ddp"
    mbit: int = 0

    @property
    def is_launched(self) -> bool:
        """Whether the ranks share the cores of one machine as a launch shares them."""
        return not self.mbit and self.threads == max(1, CORES // self.ranks)


@dataclass(frozen=True)
class Phases(Case):
    """A case, and the seconds of forward, of backward, and of the rest of its step; medians."""

    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def step_s(self) -> float:
        """Of the whole step."""
        return sum(self.seconds)


@dataclass(frozen=True)
class Messages:
    """A train of messages.

    Attributes:
        ranks: that took part.
        mbit: as in `Case`.
        collective: of gloo.
        bytes: of all messages, as `planning.communication.collective_s` counts them.
        messages: that were started at once.
        seconds: until the last one has arrived.
    """

    ranks: int
    mbit: int
    collective: str
    bytes: int
    messages: int
    seconds: float


def read_lines(path: Path = PHASES) -> list[dict[str, Any]]:
    """Return what was measured."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def read_phases(path: Path = PHASES) -> list[Phases]:
    """Return every case with the medians of its blocks."""
    blocks: defaultdict[Case, list[Sequence[float]]] = defaultdict(list)
    for line in read_lines(path):
        if "model" in line:
            blocks[Case(**{name: value for name, value in line.items() if name != "seconds"})].append(line["seconds"])
    return [
        Phases(**dataclasses.asdict(case), seconds=tuple(map(statistics.median, zip(*found, strict=True))))
        for case, found in blocks.items()
    ]


def read_messages(path: Path = PHASES) -> list[Messages]:
    """Return every train of messages."""
    return [Messages(**line) for line in read_lines(path) if "collective" in line]


def replace_lines(new: Sequence[dict[str, Any]], path: Path = PHASES) -> None:
    """Write measured lines in place of those of the same cases."""
    cases = {_case_of(line) for line in new}
    kept = [line for line in read_lines(path) if _case_of(line) not in cases]
    path.write_text("".join(json.dumps(line) + "\n" for line in (*kept, *new)))


def _case_of(line: dict[str, Any]) -> object:
    if "collective" in line:
        return tuple(line[name] for name in ("ranks", "mbit", "collective", "messages"))
    return Case(**{name: value for name, value in line.items() if name != "seconds"})


def cases_of(ranks: int, threads: int, turn: int, models: Sequence[str]) -> list[Case]:
    """Return what a job measures; at the first turn more networks, and other engines as a launch runs them."""
    light = [(model, BATCH, size) for model in GUIDE for size in IMAGE_SIZES]
    light += [(model, batch, 64) for model, batch in FITTED.items()]
    heavy = [(model, BATCH, size) for model in HEAVY for size in IMAGE_SIZES] if not turn else []
    alone = ALONE if ranks == threads == 1 and not turn else ()
    cases = [Case(ranks, threads, *one) for one in (*light, *heavy, *alone)]
    others = [
        Case(ranks, threads, model, BATCH, 64, engine, strategy)
        for model in OTHER_ENGINES
        for engine in ENGINES
        for strategy in STRATEGIES
        if engine != "native"
    ]
    cases += [case for case in others if case.is_launched and not turn]
    return [case for case in cases if case.model in models]


def measure_job(ranks: int, threads: int, cases: Sequence[Case], seconds: float, mbit: int = 0) -> list[dict[str, Any]]:
    """Measure cases in one job, and messages if it has several ranks."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.jsonl"
        words = [f"--cases={json.dumps([dataclasses.asdict(case) for case in cases])}"]
        words += [f"--seconds={seconds}", f"--result={result}", *(["--collectives"] if ranks > 1 else [])]
        if mbit:
            with two_hosts(mbit):
                on_two_hosts("-m", "benchmarks.ledger_rank", *words)
        else:
            torchrun(ranks, "benchmarks.ledger_rank", *words, threads=threads)
        lines = [json.loads(line) for line in result.read_text().splitlines()]
    return [{"ranks": ranks, "mbit": mbit} | line if "collective" in line else line for line in lines]


def jobs(rounds: int, models: Sequence[str], wires: Sequence[int]) -> Iterator[tuple[int, int, list[Case], int]]:
    """Yield ranks, threads, cases and wire of one job after another."""
    for turn in range(rounds):
        for ranks, threads in WAYS:
            yield ranks, threads, cases_of(ranks, threads, turn, models), 0
        for mbit in (mbit for mbit in wires if "mobilenet" in models and (not turn or mbit > SLOW_MBIT)):
            yield 2, 1, [Case(2, 1, "mobilenet", BATCH, 64, *way, mbit) for way in BETWEEN], mbit


def main() -> None:
    """Measure one job after another, and write what was measured after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--mbit", default="10,100,1000", help="speeds of the wire in Mbit/s, comma-separated")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="of steps per case and round")
    parser.add_argument("--out", type=Path, default=PHASES)
    given = parser.parse_args()
    start, lines = time.monotonic(), []
    wires = [int(word) for word in given.mbit.split(",") if word]
    for ranks, threads, cases, mbit in jobs(given.rounds, given.models.split(","), wires):
        where = f"two machines, {mbit} Mbit/s" if mbit else f"{ranks} rank(s) of {threads} thread(s)"
        try:
            lines += measure_job(ranks, threads, cases, given.seconds, mbit)
        except (RuntimeError, SystemExit) as error:  # the other jobs are still measured
            where += f" left out: {error}"
        replace_lines(lines, given.out)
        print(f"{time.monotonic() - start:5.0f} s: {where}, {len(cases)} cases", flush=True)


if __name__ == "__main__":
    main()
