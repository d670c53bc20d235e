"""Predicted time of training steps beside what `step_phases.py` measured on 1, 2 and 4 CPU ranks, into the ledger.

    make ledger                                     # measures first
    python benchmarks/ledger.py                     # compares what was measured, in some seconds
    python benchmarks/ledger.py --predict-again     # this machine's entries, by today's formulas

Steps from memory, with the cores shared as a launch shares them: cores / ranks threads a rank. Each is predicted twice:
from the network alone, which is what the ledger gets, and from a measured step on one core. The networks that ranks'
and engines' costs were fitted to are shown too, and are not in the ledger.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ledger_rank import CLASSES
from benchmarks.report import Section, save, show, today, versions
from benchmarks.step_phases import CORES, FITTED, PHASES, Phases, read_phases
from planning.ledger import STEP, LedgerEntry, cpu_machine, machine_name, read_ledger, replace_entries
from planning.machines import Machine
from planning.search import PlannedJob, evaluate
from training.config import TrainConfig

GOAL = 0.15
ENGINE = "native"  # whose step on one core the others are predicted from
TEXT = "fp32, AdamW; medians of the blocks of steps that `benchmarks/step_phases.py` measured."


def predicted(entry: LedgerEntry, compute_scale: float = 1.0, machine: Machine | None = None) -> float:
    """Return what the planner predicts today for an entry of CPU ranks.

    Args:
        entry: with the peaks of its machine.
        compute_scale: as `planning.step_time.predict_step` takes it.
        machine: in place of the entry's.
    """
    other: Any = entry.engine  # of the field's own values
    config = TrainConfig(
        model_type=entry.model,
        strategy=entry.strategy,
        engine=other,
        batch_size=entry.batch_size,
        precision=entry.precision,
    )
    machine = machine or cpu_machine(entry.ranks, [entry])
    job = PlannedJob(config, machine, entry.ranks, entry.classes, entry.image_size, 0, compute_scale)
    option = evaluate(job, config)
    return option.step.step_s if entry.kind == STEP else option.memory.tensors


def predict_again(entry: LedgerEntry) -> LedgerEntry:
    """Return an entry of CPU ranks with what the planner predicts today."""
    return dataclasses.replace(entry, predicted=float(f"{predicted(entry):.4g}"))


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
        product_share=gpu.product_share,
        machine=machine_name(),
        versions=versions("torch", "deepspeed"),
        date=today(),
        **run,
    )
    return predict_again(entry)


def entries_of(phases: Iterable[Phases]) -> list[LedgerEntry]:
    """Return what was measured as a launch would run it, with its predictions."""
    fields = ("model", "engine", "strategy", "ranks", "batch_size", "image_size")
    launched = [one for one in phases if one.is_launched]
    return [
        entry_of(STEP, one.step_s, classes=CLASSES, **{name: getattr(one, name) for name in fields}) for one in launched
    ]


def from_one_core(entries: Sequence[LedgerEntry], phases: Sequence[Phases]) -> dict[LedgerEntry, float]:
    """Return the seconds of entries as predicted from a measured step of the native engine on one core."""
    core, found = dataclasses.replace(cpu_machine(CORES), ranks=1), {}
    alone = {
        (one.model, one.batch_size, one.image_size): one.step_s
        for one in phases
        if (one.engine, one.ranks, one.threads, one.mbit) == ("native", 1, 1, 0)
    }
    for entry in entries:
        measured_s = alone.get((entry.model, entry.batch_size, entry.image_size))
        if measured_s:
            one = dataclasses.replace(entry, ranks=1, engine=ENGINE, strategy="ddp")
            found[entry] = predicted(entry, measured_s / predicted(one, machine=core))
    return found


def section_of(title: str, entries: Sequence[LedgerEntry], calibrated: Mapping[LedgerEntry, float]) -> Section:
    """Return a table of steps, with what was predicted from the network alone, and from a step on one core."""
    rows = []
    for one in entries:
        from_one = calibrated.get(one)
        rows.append(
            (
                *(one.model, f"{one.strategy}, {one.engine}", str(one.ranks), str(one.image_size)),
                *(f"{1000 * one.measured:.1f}", f"{1000 * one.predicted:.1f}", f"{one.error:+.0%}"),
                *(("", "") if from_one is None else (f"{1000 * from_one:.1f}", f"{from_one / one.measured - 1:+.0%}")),
            )
        )
    said = [said_of("From the network alone", [one.error for one in entries])]
    if errors := [calibrated[one] / one.measured - 1 for one in entries if one in calibrated]:
        said.append(said_of("From a measured step on one core", errors))
    columns = ("model", "strategy, engine", "ranks", "pixels", "measured, ms", "predicted, ms", "error")
    return Section(title, f"{TEXT} {' '.join(said)}", (*columns, "from one core, ms", "error"), rows)


def said_of(name: str, errors: Sequence[float]) -> str:
    """Say how far predictions were off."""
    sizes = sorted(map(abs, errors))
    worst = max(errors, key=abs)
    within = sum(size <= GOAL for size in sizes)
    half = sizes[len(sizes) // 2]
    return f"{name}: {within} of {len(sizes)} within {GOAL:.0%}, half within {half:.0%}, worst {worst:+.0%}."


def main() -> None:
    """Compare, print, save, and write the ledger."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", type=Path, default=PHASES, help="what `step_phases.py` wrote")
    parser.add_argument("--predict-again", action="store_true", help="all entries, without what was measured")
    given = parser.parse_args()
    if given.predict_again:
        replace_entries([predict_again(one) for one in read_ledger() if one.machine == machine_name()])
        return
    phases = read_phases(given.phases)
    entries = entries_of(phases)
    confirming = [one for one in entries if one.model not in FITTED]
    replace_entries(confirming)
    groups = {
        "Our engine": [one for one in confirming if one.engine == "native"],
        "PyTorch's and DeepSpeed's engines": [one for one in confirming if one.engine != "native"],
        "Networks that these costs were fitted to": [one for one in entries if one.model in FITTED],
    }
    calibrated = from_one_core(entries, phases)
    sections = [section_of(title, group, calibrated) for title, group in groups.items() if group]
    for section in sections:
        show(section)
    facts = f"{machine_name()}; {versions('torch', 'deepspeed', 'timm')}."
    save("ledger", "Predicted and measured steps", facts, shlex.join(["python", *sys.argv]), sections)


if __name__ == "__main__":
    main()
