"""Everyone against everyone, in one run: steps of three networks from memory, and training from 4,000 JPEG files.

    make bench
    make bench QUICK=1
    make bench ROUNDS=5 MINUTES=40

The same network, files, batch, optimizer, fp32, ranks and threads for all. Steps from memory run in one job, every
contestant in every round. Training from files starts each contestant by itself, in shuffled order, once per round.
Bare DDP with PyTorch's defaults is 1.00 within each round. Needs the peers of `requirements-bench.txt`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare_steps import step_rounds
from benchmarks.jpegs import make_folder
from benchmarks.launch import run
from benchmarks.peers import ours
from benchmarks.peers.bare_ddp import BASELINE, FLOOR, TUNED
from benchmarks.peers.job import Job, write_job
from benchmarks.peers.ours import SHARED_MEMORY
from benchmarks.report import Section, ratios_to, save, show, spread, versions
from zerovision.training.engines.ways import STRATEGIES

BY_HAND = (BASELINE, TUNED, "FSDP2")  # loops that users write themselves; the others are the peers
# Who of ours trains from files: contestant -> strategy, and flags beside the job's.
OURS: dict[str, tuple[str, tuple[str, ...]]] = {strategy: (strategy, ()) for strategy in STRATEGIES}
OURS["ddp, --decode exact"] = ("ddp", ("--decode", "exact"))
SAME_PIXELS = (
    "Our default decoder shrinks a JPEG while decoding it, never below twice the image size, and caches the result, "
    "with --cache ram; "
    "the peers decode every pixel of each file in each epoch, by Pillow, and so does our row with --decode exact, "
    "which has no cache."
)
# Who trains from files: contestant -> module of `peers`.
PEERS = {
    BASELINE: "bare_ddp",
    TUNED: "bare_ddp",
    "FSDP2": "fsdp2",
    "bare ZeRO-1": "bare_deepspeed",
    "Accelerate": "accelerate_loop",
    "Lightning": "lightning_trainer",
    "transformers Trainer": "transformers_trainer",
    "timm loop": "timm_loop",
}


@dataclasses.dataclass(frozen=True)
class StepTable:
    """A table of steps from memory, and what our rows should take at most, of bare DDP's time."""

    model_type: str
    image_size: int
    steps: int
    goal: float


STEP_TABLES = (
    StepTable("mobilenet", 64, steps=10, goal=0.60),
    StepTable("efficientnet", 128, steps=2, goal=0.68),
    StepTable("timm:resnet18", 128, steps=2, goal=0.82),
)
FILES = 4000
WORKER_CHOICES = (0, 1)
CALIBRATION_IMAGES = 800

Round = dict[str, list[float]]
"""Contestant -> seconds of each epoch."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is measured."""

    ranks: int
    images: int
    epochs: int
    rounds: int
    step_rounds: int
    minutes: float
    our_flags: tuple[str, ...]


def steps_section(table: StepTable, plan: Plan, job: Job) -> Section:
    """Measure steps from memory."""
    job = dataclasses.replace(job, model_type=table.model_type, image_size=table.image_size)
    rounds = step_rounds(plan.ranks, job, plan.step_rounds, table.steps)
    ratios, to_tuned = ratios_to(BASELINE, rounds), ratios_to(TUNED, rounds)
    rows = []
    for name in ratios:
        milliseconds = 1e3 * statistics.median(seconds[name] for seconds in rounds)
        rows.append((name, spread(ratios[name]), spread(to_tuned[name]), f"{milliseconds:.1f}"))
    text = (
        f"{len(rounds)} round(s) of {table.steps} steps in one job, order shuffled; median (quartiles) of the ratio "
        "within each round, less is faster. Lightning and the Trainer own their loop: each round is one short fit, "
        f"timed by a callback from its third step on. Goal of our rows: at most {table.goal:.2f} of {BASELINE}; the "
        f"row '{FLOOR}' is the floor: channels_last, no exchange, no optimizer. {SHARED_MEMORY}"
    )
    columns = ("contestant", f"time / {BASELINE}", f"time / {TUNED}", "ms/step (median)")
    return Section(f"Steps from memory, {table.model_type} at {table.image_size} pixels", text, columns, rows)


def peer_seconds(job: Job, plan: Plan, workers: Sequence[int]) -> list[list[float]]:
    """Train one peer from files, once for each number of workers; return the seconds of each epoch of each."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.json"
        words = [f"--job={write_job(job)}", f"--workers={','.join(map(str, workers))}", f"--result={result}"]
        run([f"benchmarks.peers.{PEERS[job.variant]}", *words], plan.ranks)
        return json.loads(result.read_text())


def our_seconds(job: Job, plan: Plan) -> list[float]:
    """Train one of `OURS` from files; return the seconds of each epoch."""
    strategy, flags = OURS[job.variant]
    with tempfile.TemporaryDirectory() as folder:
        entry = dataclasses.replace(job, variant=strategy)
        return ours.epoch_seconds(entry, plan.ranks, Path(folder), (*plan.our_flags, *flags))


def best_workers(job: Job, plan: Plan, cache: Path) -> dict[str, int]:
    """Let each peer train some of the files with 0 and with 1 worker a rank; return the better number of each.

    A peer that fails is left out, with what it said.
    """
    images = min(CALIBRATION_IMAGES, plan.images)
    files, chosen = make_folder(cache, images), {}
    for peer in PEERS:
        short = dataclasses.replace(job, data=str(files), epochs=1, variant=peer)
        try:
            seconds = [epochs[0] for epochs in peer_seconds(short, plan, WORKER_CHOICES)]
        except RuntimeError as error:
            print(f"{peer} is left out: {error}", flush=True)
            continue
        chosen[peer] = WORKER_CHOICES[seconds.index(min(seconds))]
        shown = zip(WORKER_CHOICES, seconds, strict=True)
        print(f"{peer}: " + ", ".join(f"{workers} workers {took:.1f} s" for workers, took in shown), flush=True)
    return chosen


def file_rounds(workers: Mapping[str, int], job: Job, plan: Plan, deadline: float) -> list[Round]:
    """Train everyone from files, once per round, while another round fits before the deadline; at least once."""
    order, shuffler, rounds = [*workers, *OURS], random.Random(0), []
    longest = 0.0
    while len(rounds) < plan.rounds and (not rounds or time.monotonic() + longest < deadline):
        start = time.monotonic()
        shuffler.shuffle(order)
        seconds = {}
        for name in order:
            entry = dataclasses.replace(job, variant=name)
            is_peer = name in workers
            seconds[name] = peer_seconds(entry, plan, [workers[name]])[0] if is_peer else our_seconds(entry, plan)
            print(f"round {len(rounds) + 1}: {name}: {', '.join(f'{s:.2f}' for s in seconds[name])} s", flush=True)
        rounds.append(seconds)
        longest = max(longest, time.monotonic() - start)
    return rounds


def files_section(rounds: list[Round], workers: Mapping[str, int], plan: Plan) -> Section:
    """Tabulate images/s of the first epoch and of the later ones, and our lead over the fastest peer."""
    names = [*workers, *OURS]
    first = [{name: plan.images / seconds[name][0] for name in names} for seconds in rounds]
    later = [{name: plan.images / statistics.mean(seconds[name][1:]) for name in names} for seconds in rounds]
    whole = [{name: plan.images * plan.epochs / sum(seconds[name]) for name in names} for seconds in rounds]
    peers = [name for name in workers if name not in BY_HAND]
    fastest = max(peers, key=lambda name: statistics.median(rates[name] for rates in later))
    compared = [ratios_to(name, later) for name in (BASELINE, TUNED, fastest)]
    compared += [ratios_to(name, whole) for name in (TUNED, fastest)]
    rows = []
    for name in names:
        middle = [f"{statistics.median(rates[name] for rates in rates_of):.0f}" for rates_of in (first, later)]
        ratios = [spread(values[name]) for values in compared]
        rows.append((name, str(workers.get(name, "auto")), *middle, *ratios))
    text = (
        f"{plan.images} files of 256x256 pixels, {plan.epochs} epochs, {len(rounds)} round(s), each contestant started "
        "by itself in shuffled order. The first epoch stands apart, because caches fill in it; ours start empty. "
        "Images per second from an epoch's first request of a batch until all ranks have done its last step; median "
        "(quartiles, or the range of two rounds) of the ratio within each round, more is faster. Workers a rank: the "
        f"better of 0 and 1 for each peer, found with {min(CALIBRATION_IMAGES, plan.images)} of the files. "
        f"The fastest peer is the fastest of the libraries; the loops by hand stand apart. {SAME_PIXELS} "
        f"{SHARED_MEMORY}"
    )
    columns = ("contestant", "workers", "images/s, epoch 1", "images/s, later", f"later / {BASELINE}")
    columns += (f"later / {TUNED}", f"later / fastest peer ({fastest})")
    columns += (f"all epochs / {TUNED}", "all epochs / fastest peer")
    return Section("From JPEG files to the weights", text, columns, rows)


def read_plan() -> tuple[Plan, Job, Path]:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="rounds from files, fewer where the time is up")
    parser.add_argument("--minutes", type=float, default=15, help="start no round that would end later than this")
    parser.add_argument("--quick", action="store_true", help="few steps and files: to see that all runs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--images", type=int, default=FILES)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--step-rounds", type=int, default=5, help="rounds of each table of steps from memory")
    parser.add_argument("--files", type=Path, default=Path("~/.cache/zerovision/bench").expanduser())
    parser.add_argument("--our-flags", default="", help="more flags for our launcher, as one word")
    given = parser.parse_args()
    flags = tuple(shlex.split(given.our_flags))
    plan = Plan(given.ranks, given.images, given.epochs, given.rounds, given.step_rounds, given.minutes, flags)
    if given.quick:
        plan = dataclasses.replace(plan, images=160, rounds=1, step_rounds=1)
    return plan, Job(epochs=plan.epochs), given.files


def main() -> None:
    """Measure, print, save."""
    plan, job, cache = read_plan()
    deadline = time.monotonic() + 60 * plan.minutes
    data = make_folder(cache, plan.images)
    sections = []
    for table in STEP_TABLES:
        sections.append(steps_section(table, plan, job))
        show(sections[-1])
    job = dataclasses.replace(job, data=str(data))
    workers = best_workers(job, plan, cache)
    files = files_section(file_rounds(workers, job, plan, deadline), workers, plan)
    show(files)
    packages = ("torch", "torchvision", "deepspeed", "accelerate", "lightning", "transformers", "timm")
    facts = (
        f"{job.batch_size} images per rank ({job.model_type} at {job.image_size} pixels from files), {plan.ranks} CPU "
        f"ranks over gloo, 1 thread each, fp32, AdamW, no clipping. {versions(*packages)}."
    )
    name = "quick" if plan.images < FILES else "compare"
    save(name, "Everyone against everyone", facts, shlex.join(["python", *sys.argv]), [*sections, files])


if __name__ == "__main__":
    main()
