"""Predicted and measured time of a training step of every model on 1, 2 and 4 CPU ranks, into the ledger.

    make ledger
    python benchmarks/ledger.py --models mobilenet --ranks 2
    python benchmarks/ledger.py --predict-again     # the measured steps of the ledger, predicted by today's formulas

Steps of our engine from memory, under ddp, with the cores shared as a launch shares them: cores / ranks threads a rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.launch import torchrun
from benchmarks.report import Section, save, show, today, versions
from models.build import build_model
from models.dry_run import without_data
from models.operators import Operator, count_operators
from planning.ledger import LedgerEntry, cpu_machine, machine_name, read_ledger, replace_entries
from planning.step_time import predict_step
from training.parallel.strategies import plan_of

CLASSES, BATCH = 10, 16
MODELS = ("basic_cnn", "mobilenet", "efficientnet", "vgg", "cnn_lstm", "ensemble")
IMAGE_SIZES = (32, 64)
ENGINE = "native"  # that --engine auto takes on CPU ranks under ddp


@functools.cache
def counted(model: str, image_size: int) -> tuple[tuple[Operator, ...], int]:
    """Return a network's operators and parameters."""
    with torch.device("meta"):
        module = build_model(model, num_classes=CLASSES, image_size=image_size).module
    operators = count_operators(without_data(module), image_size)
    assert operators is not None
    return operators, sum(parameter.numel() for parameter in module.parameters())


def predicted_s(entry: LedgerEntry) -> float:
    """Return the seconds of a step for the machine that an entry names."""
    machine = cpu_machine(entry.ranks, [entry])
    plan = plan_of(entry.strategy, entry.ranks)
    operators, parameters = counted(entry.model, entry.image_size)
    return predict_step(operators, parameters, machine, plan, engine=entry.engine, batch_size=entry.batch_size).step_s


def measure(models: list[str], ranks: int, seconds: float) -> list[LedgerEntry]:
    """Measure all cases of these ranks in one job."""
    cases = [[model, BATCH, size, "ddp"] for model in models for size in IMAGE_SIZES]
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    gpu = cpu_machine(ranks).gpu
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.jsonl"
        words = (f"--cases={json.dumps(cases)}", f"--seconds={seconds}", f"--result={result}")
        torchrun(ranks, "benchmarks.ledger_rank", *words, threads=threads)
        measured = [sum(json.loads(line)) for line in result.read_text().splitlines()]
    entries = [
        LedgerEntry(
            *("cpu", model, ENGINE, "ddp", ranks, BATCH, size, "fp32", 0.0, float(f"{step_s:.4g}")),
            *(gpu.peaks["fp32"], gpu.bandwidth_bytes_per_s, machine_name(), versions("torch"), today()),
        )
        for (model, _, size, _), step_s in zip(cases, measured, strict=True)
    ]
    return [predict_again(entry) for entry in entries]


def predict_again(entry: LedgerEntry) -> LedgerEntry:
    """Return an entry with today's prediction."""
    return dataclasses.replace(entry, predicted_s=float(f"{predicted_s(entry):.4g}"))


def section_of(entries: list[LedgerEntry]) -> Section:
    """Return the table."""
    rows = [
        (
            *(one.model, str(one.ranks), str(one.image_size)),
            *(f"{1000 * one.predicted_s:.1f}", f"{1000 * one.measured_s:.1f}", f"{one.error:+.0%}"),
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
