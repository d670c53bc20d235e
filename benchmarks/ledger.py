"""Predicted and measured time of a training step of every model on 1, 2 and 4 CPU ranks, into the ledger.

    make ledger
    python benchmarks/ledger.py --models mobilenet --ranks 2
    python benchmarks/ledger.py --predict-again     # this machine's entries, by today's formulas

Steps of our engine from memory, under ddp, with the cores shared as a launch shares them: cores / ranks threads a rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launch import torchrun
from benchmarks.report import Section, save, show, today, versions
from planning.ledger import STEP, LedgerEntry, cpu_machine, machine_name, read_ledger, replace_entries
from planning.search import PlannedJob, evaluate
from training.config import TrainConfig

CLASSES, BATCH = 10, 16
MODELS = ("basic_cnn", "mobilenet", "efficientnet", "vgg", "cnn_lstm", "ensemble")
IMAGE_SIZES = (32, 64)
ENGINE = "native"  # that --engine auto takes on CPU ranks under ddp


def predict_again(entry: LedgerEntry) -> LedgerEntry:
    """Return an entry of CPU ranks with what the planner predicts today, for the machine that it names."""
    other: Any = entry.engine  # of the field's own values
    config = TrainConfig(
        model_type=entry.model,
        strategy=entry.strategy,
        engine=other,
        batch_size=entry.batch_size,
        precision=entry.precision,
    )
    machine = cpu_machine(entry.ranks, [entry])
    option = evaluate(PlannedJob(config, machine, entry.ranks, entry.classes, entry.image_size, images=0), config)
    found = option.step.step_s if entry.kind == STEP else option.memory.tensors
    return dataclasses.replace(entry, predicted=float(f"{found:.4g}"))


def entry_of(kind: str, measured: float, **run: Any) -> LedgerEntry:
    """Return what CPU ranks of this machine measured in fp32, with its prediction.

    Args:
        kind: as in `LedgerEntry`.
        measured: likewise.
        run: the fields from `model` to `classes`.
    """
    gpu = cpu_machine(run["ranks"]).gpu
    entry = LedgerEntry(
        kind=kind,
        device="cpu",
        precision="fp32",
        predicted=0.0,
        measured=float(f"{measured:.4g}"),
        peak=gpu.peaks["fp32"],
        bandwidth=gpu.bandwidth_bytes_per_s,
        machine=machine_name(),
        versions=versions("torch", "deepspeed"),
        date=today(),
        **run,
    )
    return predict_again(entry)


def measure(models: list[str], ranks: int, seconds: float) -> list[LedgerEntry]:
    """Measure all cases of these ranks in one job."""
    cases = [[model, BATCH, size, "ddp"] for model in models for size in IMAGE_SIZES]
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.jsonl"
        words = (f"--cases={json.dumps(cases)}", f"--seconds={seconds}", f"--result={result}")
        torchrun(ranks, "benchmarks.ledger_rank", *words, threads=threads)
        measured = [sum(json.loads(line)) for line in result.read_text().splitlines()]
    run = {"engine": ENGINE, "strategy": "ddp", "ranks": ranks, "batch_size": BATCH, "classes": CLASSES}
    return [
        entry_of(STEP, step_s, model=model, image_size=size, **run)
        for (model, _, size, _), step_s in zip(cases, measured, strict=True)
    ]


def section_of(entries: list[LedgerEntry]) -> Section:
    """Return the table."""
    rows = [
        (
            *(one.model, str(one.ranks), str(one.image_size)),
            *(f"{1000 * one.predicted:.1f}", f"{1000 * one.measured:.1f}", f"{one.error:+.0%}"),
        )
        for one in entries
    ]
    errors = sorted(abs(one.error) for one in entries)
    text = (
        f"ddp, native engine, fp32, AdamW, {BATCH} images a rank; medians. Error of the prediction: half within "
        f"{errors[len(errors) // 2]:.0%}, {sum(error <= 0.15 for error in errors)} of {len(errors)} within 15 %."
    )
    return Section("Steps", text, ("model", "ranks", "pixels", "predicted, ms", "measured, ms", "error"), rows)


def main() -> None:
    """Measure or predict again, print, save, and write the ledger."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--ranks", default="1,2,4", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=1.0, help="of steps per case")
    parser.add_argument("--predict-again", action="store_true", help="measure nothing")
    given = parser.parse_args()
    if given.predict_again:
        entries = [predict_again(one) for one in read_ledger() if one.machine == machine_name()]
        replace_entries(entries)
        entries = [one for one in entries if one.kind == STEP]
    else:
        entries = [
            entry
            for ranks in map(int, given.ranks.split(","))
            for entry in measure(given.models.split(","), ranks, given.seconds)
        ]
        replace_entries(entries)
    section = section_of(entries)
    show(section)
    facts = f"{machine_name()}; {versions('torch')}."
    save("ledger", "Predicted and measured steps", facts, shlex.join(["python", *sys.argv]), [section])


if __name__ == "__main__":
    main()
