"""The end of a run: what cannot be written is told, and spoils nothing."""

from __future__ import annotations

import json

from made_runs import make_run

from delivery.finish import finish_run
from training.run_folder import RunFolder


def about_the_report(folder: RunFolder, *, with_report: bool) -> list[str]:
    """What is said of it; the run has no weights, so there is a line about its model card too."""
    return [
        line
        for line in finish_run(folder, lambda index: None, with_report=with_report)
        if line.startswith(("report ", "note: the report "))
    ]


def test_a_report_that_cannot_be_written_is_a_note(tmp_path):
    folder = RunFolder(tmp_path, "run")
    make_run(folder.path, class_names=None)
    assert about_the_report(folder, with_report=True) == [f"report       {folder.path}/report.html"]
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    folder.metrics.write_text("damaged\n")
    (note,) = about_the_report(folder, with_report=True)
    assert note.startswith("note: the report could not be written (UserError: ")
    assert (folder.path / "report.html").read_text(encoding="utf-8") == page


def test_without_a_report(tmp_path):
    folder = RunFolder(tmp_path, "run")
    make_run(folder.path, class_names=None)
    assert about_the_report(folder, with_report=False) == []
    assert not (folder.path / "report.html").exists()
    assert json.loads((folder.path / "config.json").read_text())["report"] is True
