"""The end of a run: what cannot be written is told, and spoils nothing."""

from __future__ import annotations

import json

import pytest
from made_runs import make_run

from zerovision.delivery.end_of_run import leave_files
from zerovision.training.base.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    """A run without weights and without an evaluation, as one that was stopped in its first epoch."""
    folder = RunFolder(tmp_path, "run")
    make_run(folder.path, class_names=None)
    return folder


def leave(folder, **changes):
    return leave_files(folder, {"val": None}, **({"with_card": False, "with_report": True} | changes))


def test_a_report_that_cannot_be_written_is_a_note(folder):
    assert leave(folder) == [f"report       {folder.path}/report.html"]
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    folder.metrics.write_text("damaged\n")
    (note,) = leave(folder)
    assert note.startswith("note: the report could not be written (UserError: ")
    assert (folder.path / "report.html").read_text(encoding="utf-8") == page


def test_a_model_card_that_cannot_be_written_is_a_note(folder):
    report, note = leave(folder, with_card=True)
    assert report == f"report       {folder.path}/report.html"
    assert note.startswith("note: the model card could not be written (UserError: weights file ")


def test_without_a_report(folder):
    assert leave(folder, with_report=False) == []
    assert not (folder.path / "report.html").exists()
    assert json.loads((folder.path / "config.json").read_text())["report"] is True
