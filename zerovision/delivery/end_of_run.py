"""Writes the files at the end of a run: the full evaluation, the model card, and the report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from zerovision.delivery.activation_map import explainer
from zerovision.delivery.evaluation_files import write_evaluation
from zerovision.training.base.run_folder import (
    EVALUATION,
    REPORT,
    TEST_EVALUATION,
    RunFolder,
    shown_path,
)
from zerovision.training.checkpoint.weights import load_model, read_metadata
from zerovision.training.data.reading.sources import Source
from zerovision.training.observe.evaluation import read_scores


def leave_files(folder: RunFolder, sources: Mapping[str, Source], *, with_card: bool, with_report: bool) -> list[str]:
    """Write the files about the best epoch so far; errors are returned as notes, so that they cannot fail the run.

    Args:
        folder: the run's folder.
        sources: images of each part: "val", and "test" if the data has a test part.
        with_card: whether to write the model card, which is meant only for finished runs.
        with_report: whether to write the report.

    Returns:
        A line with the report's path, and one line for each file that could not be written.
    """
    from zerovision.delivery.model_card import (
        write_model_card,  # imported late, so that startup does not load the page libraries
    )
    from zerovision.delivery.report.page import write_report

    report = folder.path / REPORT
    steps: dict[str, Callable[[], object]] = {
        "evaluation": lambda: _write_evaluation(folder, EVALUATION, sources["val"])
    }
    if "test" in sources:
        steps["evaluation of the test part"] = lambda: _write_evaluation(folder, TEST_EVALUATION, sources["test"])
    if with_card:
        steps["model card"] = lambda: write_model_card(folder.path)
    if with_report:
        steps["report"] = lambda: write_report([folder.path], report)
    notes = {}
    for name, write in steps.items():
        try:
            write()
        except Exception as error:  # whatever the cause
            notes[name] = f"note: the {name} could not be written ({type(error).__name__}: {error})"
    shown = {"report": f"report       {shown_path(report)}"} if with_report else {}
    return [*(shown | notes).values()]


def _write_evaluation(folder: RunFolder, name: str, source: Source) -> None:
    facts = read_scores(folder.path / name)
    # If a run was killed between writing the weights and the scores, the scores are from an older epoch.
    if facts is not None and facts["epoch"] == read_metadata(folder.weights)["extra"].get("epoch"):
        explain = None
        with contextlib.suppress(Exception):  # for example, for weights without a classifier
            module, metadata = load_model(folder.weights)
            explain = explainer(module, metadata["preprocessing"])
        write_evaluation(folder.path / name, facts, source.read, explain)
