"""The check of a whole data set, and the command that calls it."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
from made_data import save_animation
from PIL import Image

from zerovision.commands import run_command
from zerovision.planning.data_check import check_data
from zerovision.training.data import DataOptions


@pytest.fixture
def folder(tmp_path):
    generator = np.random.Generator(np.random.PCG64(0))
    for name, sizes in (("a", [(10, 20), (30, 5), (8, 8)]), ("[b]", [(50, 40), (9, 9)])):
        (tmp_path / name).mkdir()
        for number, (width, height) in enumerate(sizes):
            Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(
                tmp_path / name / f"{number}.png"
            )
    return tmp_path


@pytest.mark.parametrize("workers", [0, 1])
def test_every_image_is_decoded_and_measured(folder, workers):
    (folder / "a" / "cut.jpg").write_bytes((folder / "a" / "0.png").read_bytes()[:200])
    (folder / "[b]" / "text.jpg").write_text("text")
    save_animation(folder / "a" / "0.png", (9, 9))
    report = check_data(DataOptions(data=str(folder)), workers=workers)
    assert report.images == 7
    assert report.datasets.class_names == ["[b]", "a"]
    assert report.sizes == [(8, 8), (50, 40)]
    assert {path for path, _ in report.unreadable} == {str(folder / "a" / "cut.jpg"), str(folder / "[b]" / "text.jpg")}
    assert all(reason for _, reason in report.unreadable)
    assert report.image_notes == [(str(folder / "a" / "0.png"), "several frames or pages, the first is used")]


def test_thin_images_are_named(folder):
    for size in ((2, 40), (2, 41), (41, 2)):
        Image.new("RGB", size).save(folder / "a" / f"{size[0]}x{size[1]}.png")
    report = check_data(DataOptions(data=str(folder)))
    expected = {str(folder / "a" / f"{size}.png"): f"{size} pixels, thinner than 1:20" for size in ("2x41", "41x2")}
    assert dict(report.image_notes) == expected


def test_images_in_memory():
    report = check_data(DataOptions())
    assert (report.images, report.unreadable) == (1797, [])
    assert report.sizes == [(32, 32)] * 2


def test_doctor_reports_a_good_data_set(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--check-data", "digits"])
    assert run_command("doctor") == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert "labels 0 to 9" in printed
    assert "0 of 1797 images cannot be used" in printed


def test_doctor_names_what_is_unreadable(folder, monkeypatch, capsys):
    (folder / "a" / "text.jpg").write_text("text")
    os.mkfifo(folder / "a" / "pipe.jpg")
    save_animation(folder / "a" / "0.png", (9, 9))
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--check-data", str(folder)])
    assert run_command("doctor") == 1
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert f"unreadable: '{folder}/a/text.jpg': not an image" in printed
    assert f"note on '{folder}/a/0.png': several frames" in printed
    assert "skipped 1 files that are not images by type or extension: 1 not a regular file" in printed
    assert "labels 0 to 1" in printed
    assert "[b]" in printed
