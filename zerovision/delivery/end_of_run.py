"""What a run leaves for people when it ends: the evaluation in full, the model card, and the report of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from zerovision.delivery.activation_map import explainer
from zerovision.delivery.evaluation_files import write_evaluation
from zerovision.training.base.atomic_write import write_json
from zerovision.training.base.run_folder import (
    EVALUATION,
    METRICS,
    PREDICTION,
    REPORT,
    TEST_EVALUATION,
    RunFolder,
    shown_path,
)
from zerovision.training.base.units import format_bytes
from zerovision.training.checkpoint.weights import load_model, read_metadata
from zerovision.training.data.reading.sources import Source
from zerovision.training.observe.evaluation import read_scores
from zerovision.training.observe.memory_limit import peak_memory


def leave_files(folder: RunFolder, sources: Mapping[str, Source], *, with_card: bool, with_report: bool) -> list[str]:
    """Write the files about the best epoch so far; nothing that goes wrong here may spoil a run that went well.

    Args:
        folder: of the run.
        sources: the images of each part: "val", and "test" if there is one.
        with_card: whether to write the model card: of a run that has finished, no other.
        with_report: whether to write the report too.

    Returns:
        One line for each thing that could not be written, and the report's path.
    """
    from zerovision.delivery.model_card import (
        write_model_card,  # imported late: no start should wait for the libraries of pages
    )
    from zerovision.delivery.report.page import write_report

    report = folder.path / REPORT
    steps: dict[str, Callable[[], object]] = {
        "evaluation": lambda: _write_evaluation(folder, EVALUATION, sources["val"])
    }
    if "test" in sources:
        steps["evaluation of the test part"] = lambda: _write_evaluation(folder, TEST_EVALUATION, sources["test"])
    steps["memory"] = lambda: count_evaluation(folder.path)
    if with_card:
        steps["model card"] = lambda: write_model_card(folder.path)
    if with_report:
        steps["report"] = lambda: write_report([folder.path], report)
    notes = {}
    for name, write in steps.items():
        try:
            write()
        except Exception as error:  # whatever it is
            notes[name] = f"note: the {name} could not be written ({type(error).__name__}: {error})"
    shown = {"report": f"report       {shown_path(report)}"} if with_report else {}
    lines = [*(shown | notes).values()]
    with contextlib.suppress(Exception):  # a prediction that cannot be read, whatever it is
        if line := prediction_line(folder.path):
            lines.insert(0, line)
    return lines


def count_evaluation(folder: Path) -> None:
    """Note the most memory that this process has had, of a CPU rank, beside the run's prediction, if there is one."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # as of a prediction that failed
        prediction = json.loads((folder / PREDICTION).read_text(encoding="utf-8"))
        if prediction["memory_bytes"]["process"]:
            write_json(folder / PREDICTION, prediction | {"rank_0_bytes": peak_memory(torch.device("cpu"))})


def prediction_line(folder: Path) -> str | None:
    """Return the line for a run's log, None if it has no prediction or no `end` line."""
    from zerovision.delivery.report.run_facts import compare_memory  # imported late, as above

    metrics = folder / METRICS
    lines = metrics.read_bytes().splitlines() if metrics.is_file() else []
    end = json.loads(lines[-1]) if lines else {}
    found = compare_memory(folder, end) if end.get("kind") == "end" else None
    if found is None:
        return None
    predicted, measured = map(format_bytes, found)
    return f"predicted    memory of a rank {predicted} ({measured} measured, ratio {found[0] / found[1]:.2f})"


def _write_evaluation(folder: RunFolder, name: str, source: Source) -> None:
    facts = read_scores(folder.path / name)
    # A run that was killed between the two files has the scores of an older epoch.
    if facts is not None and facts["epoch"] == read_metadata(folder.weights)["extra"].get("epoch"):
        explain = None
        with contextlib.suppress(Exception):  # as of weights that tell no classes apart
            module, metadata = load_model(folder.weights)
            explain = explainer(module, metadata["preprocessing"])
        write_evaluation(folder.path / name, facts, source.read, explain)
