"""Predicted time of training steps beside what `step_phases.py` measured on 1, 2 and 4 CPU ranks, into the ledger.

    make ledger                                     # measures first
    python benchmarks/ledger.py                     # compares what was measured, in some seconds
    python benchmarks/ledger.py --predict-again     # this machine's entries, by today's formulas

Steps from memory, with the cores shared as a launch shares them: cores / ranks threads a rank. Each is predicted twice:
from the network alone, which is what the ledger gets, and from the measured step of one rank. The networks that ranks'
and engines' costs were fitted to are shown too, and are not in the ledger.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ledger_rank import CLASSES
from benchmarks.report import Section, save, show, today, versions
from benchmarks.step_phases import FITTED, PHASES, Phases, read_phases
from planning.ledger import STEP, LedgerEntry, cpu_machine, machine_name, read_ledger, replace_entries
from planning.search import PlannedJob, evaluate
from training.config import TrainConfig

GOAL = 0.15


def predicted(entry: LedgerEntry, compute_scale: float = 1.0) -> float:
    """Return what the planner predicts today for an entry of CPU ranks, on the machine that it names."""
    other: Any = entry.engine  # of the field's own values
    config = TrainConfig(
        model_type=entry.model,
        strategy=entry.strategy,
        engine=other,
        batch_size=entry.batch_size,
        precision=entry.precision,
    )
    machine = cpu_machine(entry.ranks, [entry])
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


def from_one_rank(entries: Sequence[LedgerEntry]) -> dict[LedgerEntry, float]:
    """Return the seconds of entries of several ranks, predicted from the one of one rank of the same run."""
    alone = {_work_of(entry): entry for entry in entries if entry.ranks == 1}
    found = {}
    for entry in entries:
        one = alone.get(_work_of(entry))
        if one is not None and entry.ranks > 1:
            found[entry] = predicted(entry, one.measured / one.predicted)
    return found


def _work_of(entry: LedgerEntry) -> tuple[object, ...]:
    return entry.model, entry.engine, entry.strategy, entry.batch_size, entry.image_size


def section_of(title: str, text: str, entries: Sequence[LedgerEntry]) -> Section:
    """Return a table of steps, with what was predicted from the network alone, and from one rank's measured step."""
    calibrated, rows = from_one_rank(entries), []
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
    if calibrated:
        errors = [value / one.measured - 1 for one, value in calibrated.items()]
        said.append(said_of("From one rank's measured step", errors))
    columns = ("model", "strategy, engine", "ranks", "pixels", "measured, ms", "predicted, ms", "error")
    return Section(title, f"{text} {' '.join(said)}", (*columns, "from one rank, ms", "error"), rows)


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
    entries = entries_of(read_phases(given.phases))
    confirming = [one for one in entries if one.model not in FITTED]
    replace_entries(confirming)
    groups = {
        "Our engine": [one for one in confirming if one.engine == "native"],
        "PyTorch's and DeepSpeed's engines": [one for one in confirming if one.engine != "native"],
        "Networks that these costs were fitted to": [one for one in entries if one.model in FITTED],
    }
    text = "fp32, AdamW; medians of blocks of steps."
    sections = [section_of(title, text, group) for title, group in groups.items() if group]
    for section in sections:
        show(section)
    facts = f"{machine_name()}; {versions('torch', 'deepspeed', 'timm')}."
    save("ledger", "Predicted and measured steps", facts, shlex.join(["python", *sys.argv]), sections)


if __name__ == "__main__":
    main()
