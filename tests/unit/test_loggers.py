"""What reaches the console, the files and TensorBoard's figure."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import io
import json
import sys
import threading

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from zerovision.training.base.points import (
    DeviceUse,
    EpochPoint,
    Loggers,
    RunPoint,
    ScoreSummary,
    StepPoint,
    epoch_line,
    run_lines,
)
from zerovision.training.base.run_folder import RunFolder
from zerovision.training.config import TrainConfig
from zerovision.training.observe.loggers import open_loggers
from zerovision.training.observe.loggers.confusion import confusion_picture
from zerovision.training.observe.loggers.tensorboard import TensorBoardLogger
from zerovision.training.observe.loggers.text import ConsoleLogger, JsonLinesLogger, TextLogger
from zerovision.training.tasks.scores import SampleScores, Scores

SHARES = {"data": 0.01, "forward": 0.35, "backward": 0.48, "communication": 0.09, "optimizer": 0.04, "other": 0.03}
STEP = StepPoint(
    epoch=2,
    step=13,
    steps_per_epoch=10,
    total_steps=50,
    loss=0.5,
    learning_rate=0.001,
    images_per_second=321.0,
    data_wait_share=0.125,
    seconds=0.5,
    seconds_left=75.0,
    gradient_norm=1.5,
    skipped_steps=0,
    time_shares=SHARES,
    device=DeviceUse(3_000_000_000, 2_000_000_000, None, 0.05, None, None, 7_000_000_000),
    cpu_utilization={"node01": 0.5, "node02": 0.75},
)
RUN = RunPoint(
    step=50,
    seconds=200.0,
    evaluation_seconds=12.0,
    images_per_second=310.0,
    time_shares=SHARES,
    device=DeviceUse(3_000_000_000, 2_000_000_000, 2_500_000_000, 123.4, 0.1247, 0.97),
    memory_bytes_per_rank=[3_000_000_000, 2_900_000_000],
)
INDICES = torch.arange(2)
LOSSES, CONFIDENCES = torch.tensor([0.2, 0.4]), torch.tensor([0.8, 0.7])
DETAILS = SampleScores(INDICES, INDICES, INDICES, LOSSES, CONFIDENCES, torch.ones(2, dtype=torch.bool))
EPOCH = EpochPoint(
    epoch=2,
    step=20,
    epochs=5,
    train_loss=0.4,
    train_top1=0.8,
    validation=Scores(0.3, 0.9, 0.99, 360, DETAILS),
    summary=ScoreSummary("top1", score=0.9, lowest_recall=0.25, lowest_recall_class="dog"),
    images_per_second=300.0,
    data_wait_share=0.1,
    seconds=5.0,
    evaluation_seconds=1.5,
    memory_bytes_per_rank=[3_000_000_000, 2_900_000_000],
    is_best=True,
    diverged=None,
    class_names=["cat", "dog", "fox", "hen", "owl", "pig"],
)


class ZMQInteractiveShell:
    """What a notebook's `get_ipython()` returns; its streams are no terminals."""


@pytest.fixture(params=[False, True], ids=["script", "notebook"])
def place(request, monkeypatch):
    """A script's process or a notebook's, with the variables that notebooks and CI set."""
    for name, value in {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "TERM": "xterm-color", "COLUMNS": "140"}.items():
        monkeypatch.setenv(name, value)
    if request.param:
        monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)


def console_output(mode, is_terminal, monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", stream)
    logger = ConsoleLogger(mode)
    logger.steps(STEP)
    logger.epoch(EPOCH)
    logger.close()
    return stream.getvalue()


def test_a_terminal_gets_a_bar(place, monkeypatch):
    shown = console_output("auto", True, monkeypatch)
    for word in ("epoch 2", "3/10", "loss 0.5000", "lr 0.001", "321 images/s", "data wait 12.5%", "left 1 min 15 s"):
        assert word in shown
    assert "━" in shown


def line(**changes):
    return epoch_line(dataclasses.replace(EPOCH, **changes))


def test_the_line_of_an_epoch_has_what_there_is_and_the_score_that_counts():
    assert line(is_best=False, diverged="the validation loss is nan").endswith("5.0 s  diverged")
    solved = line(train_loss=None, train_top1=None, images_per_second=0.0, seconds=0.0)
    assert solved == "epoch 2/5  val loss 0.3000  top-1 90.00 %  top-5 99.00 %  best"
    chosen = line(summary=ScoreSummary("macro_f1", 0.75, 0.25, "b\x1b[1m"))
    assert r"top-5 99.00 %  macro F1 75.00 %  lowest recall 25.00 % (b\x1b[1m)  300 images/s" in chosen
    assert line(summary=EPOCH.summary._replace(best_by="loss", score=0.3)) == line()


def test_top5_is_shown_where_it_says_something():
    five = EPOCH.class_names[:5]
    assert "top-1 90.00 %  300 images/s" in line(class_names=five)
    by_top5 = EPOCH.summary._replace(best_by="top5")
    assert "top-1 90.00 %  top-5 99.00 %  300" in line(class_names=five, summary=by_top5)
    assert "top-5" not in line(validation=dataclasses.replace(EPOCH.validation, task="multilabel"))


def test_files_and_notebooks_get_plain_lines(place, monkeypatch):
    shown = console_output("auto", False, monkeypatch)
    assert "\x1b" not in shown
    assert shown == (
        "epoch 2/5  train loss 0.4000  val loss 0.3000  top-1 90.00 %  top-5 99.00 %  300 images/s  5.0 s  best\n"
    )


def test_progress_off_leaves_what_is_no_progress(tmp_path, capsys):
    folder = run_folder(tmp_path)
    config = TrainConfig(progress="off", tensorboard=False)
    loggers = open_loggers(config, folder, {}, {}, first_step=0)
    loggers.message("run r: basic_cnn")
    loggers.steps(STEP)
    loggers.epoch(EPOCH)
    loggers.message("top-1 90.00 % on 360 held-out images")
    loggers.end(RUN)
    loggers.close()
    assert capsys.readouterr().out.splitlines() == [
        "run r: basic_cnn",
        "top-1 90.00 % on 360 held-out images",
        *run_lines(RUN),
    ]


def run_folder(path, name="run"):
    folder = RunFolder(path, name)
    folder.path.mkdir(parents=True)
    return folder


def test_files_hold_the_numbers(tmp_path):
    folder = run_folder(tmp_path)
    for logger in (TextLogger(folder), JsonLinesLogger(folder)):
        logger.message("hello")
        logger.steps(STEP)
        logger.epoch(EPOCH)
        logger.end(RUN)
        logger.close()
    text = folder.text_log.read_text()
    assert text.count("\n") == 5
    assert "run hello" in text
    step, epoch, end = (json.loads(line) for line in folder.metrics.read_text().splitlines())
    assert (step["kind"], step["loss"], step["gradient_norm"]) == ("step", 0.5, 1.5)
    assert (step["memory_bytes"], step["tflops_per_second"], step["mfu"]) == (3_000_000_000, 0.05, None)
    assert (epoch["kind"], epoch["val_top1"], epoch["val_samples"]) == ("epoch", 0.9, 360)
    assert (epoch["evaluation_seconds"], epoch["memory_bytes_per_rank"]) == (1.5, [3_000_000_000, 2_900_000_000])
    assert (end["kind"], end["time_shares"], end["mfu"]) == ("end", SHARES, 0.1247)


def test_a_run_ends_with_its_time_speed_and_memory():
    assert run_lines(RUN) == [
        "time         data 1 %, forward 35 %, backward 48 %, communication 9 %, optimizer 4 %, other 3 %",
        "speed        310 images/s in 3 min 20 s, plus 12 s of evaluation, 123 TFLOP/s per rank, MFU 12.5 %; "
        "memory of rank 0: peak 3 GB, now 2 GB, reserved 2.5 GB",
    ]


def test_tensorboard_gets_the_scalars_of_a_point(tmp_path):
    folder = run_folder(tmp_path)
    logger = TensorBoardLogger(folder, {}, {}, 0)
    logger.steps(STEP)
    logger.end(RUN)
    logger.close()
    read = EventAccumulator(str(folder.tensorboard)).Reload()
    expected = {"train/loss": 0.5, "time/forward": 0.35, "speed/tflops_per_second": 0.05, "run/speed/mfu": 0.1247}
    expected |= {"disk/free_bytes": 7e9, "speed/cpu_utilization/node02": 0.75}
    for tag, value in expected.items():
        (event,) = read.Scalars(tag)
        assert (event.step, event.value) == (RUN.step if "run/" in tag else STEP.step, pytest.approx(value)), tag
    assert "speed/mfu" not in read.Tags()["scalars"], "what is not known is left out"


def test_events_are_lines_for_programs(tmp_path):
    folder = run_folder(tmp_path)
    loggers = Loggers([TextLogger(folder), ConsoleLogger("lines"), JsonLinesLogger(folder)])
    loggers.event("checkpoint", {"step": 12, "name": "step-00001-0000002", "stall_seconds": 0.003})
    loggers.event("skipped_step", {"step": 13, "samples": ["a b.png", 'q"\n.png']})
    loggers.close()
    first, second = (json.loads(line) for line in folder.metrics.read_text().splitlines())
    assert first.pop("time") <= second.pop("time")
    assert first == {"kind": "checkpoint", "step": 12, "name": "step-00001-0000002", "stall_seconds": 0.003}
    assert second == {"kind": "skipped_step", "step": 13, "samples": ["a b.png", 'q"\n.png']}
    assert folder.text_log.read_text() == ""


@pytest.mark.parametrize("whole", ["", '{"kind": "step", "step": 1}\n', '{"a": 1}\n{"b": 2}\n'])
@pytest.mark.parametrize("half", ["", "{", '{"kind": "step", "lo', '{"kind": "step"}'])
def test_a_half_line_of_a_killed_run_is_cut(tmp_path, whole, half):
    folder = run_folder(tmp_path)
    folder.metrics.write_text(whole + half)
    logger = JsonLinesLogger(folder)
    assert folder.metrics.read_text() == whole
    logger.event("resume", {"step": 1})
    logger.close()
    lines = folder.metrics.read_text().splitlines(keepends=True)
    assert "".join(lines[:-1]) == whole
    assert json.loads(lines[-1])["kind"] == "resume"


# A full disk.


def log_much(loggers, times=300):
    for number in range(times):
        loggers.steps(STEP)
        loggers.message(f"message {number} " + "x" * 100)
        loggers.event("checkpoint", {"step": number})
    loggers.images(torch.rand(4, 3, 64, 64))
    loggers.epoch(EPOCH)


@contextlib.contextmanager
def full(disk):
    """Leave no byte on a disk, inside the block."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1024)):
            pass
    yield
    filler.unlink()


def test_training_goes_on_where_the_text_log_cannot_be_written(tmp_path, capsys):
    folder = run_folder(tmp_path)
    folder.text_log.symlink_to("/dev/full")
    loggers = Loggers([TextLogger(folder), JsonLinesLogger(folder)])
    log_much(loggers)
    loggers.close()
    assert capsys.readouterr().err == (
        "TextLogger cannot write ([Errno 28] No space left on device): training continues without it\n"
    )
    assert len(folder.metrics.read_text().splitlines()) == 601, "the other loggers miss nothing"


def test_metrics_go_on_after_a_full_disk(small_disk, capsys):
    folder = run_folder(small_disk)
    loggers = Loggers([JsonLinesLogger(folder)])
    with full(small_disk):
        log_much(loggers)
    loggers.event("after", {})
    loggers.close()
    told = capsys.readouterr().err
    assert told.count("\n") == told.count("JsonLinesLogger cannot write") == 1
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert lines[-1]["kind"] == "after", "no half line in front of it"


def test_closing_on_a_full_disk_ends(small_disk, capsys):
    loggers = Loggers([TextLogger(run_folder(small_disk)), JsonLinesLogger(run_folder(small_disk, "second"))])
    with full(small_disk):
        log_much(loggers, times=10)
        loggers.close()
    told = capsys.readouterr().err.splitlines()
    assert sorted(line.split()[0] for line in told) == ["JsonLinesLogger", "TextLogger"]


# The library's thread dies with a traceback of its own, which pytest turns into a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.timeout(60)
def test_tensorboard_does_not_hang_on_a_full_disk(small_disk, capsys):
    before = set(threading.enumerate())
    loggers = Loggers([TensorBoardLogger(run_folder(small_disk), {}, {}, 0)])
    with full(small_disk):
        log_much(loggers)
        loggers.close()
    log_much(loggers, times=20)
    loggers.close()
    assert capsys.readouterr().err.count("TensorBoardLogger cannot write") == 1
    assert set(threading.enumerate()) <= before, "its thread has ended"


def test_the_confusion_matrix_is_drawn_at_the_first_and_the_last_epoch(tmp_path):
    folder = run_folder(tmp_path)
    logger = TensorBoardLogger(folder, {}, {}, 0)
    for epoch in (1, 2, 3):
        logger.epoch(dataclasses.replace(EPOCH, epoch=epoch, epochs=3))
    logger.close()
    read = EventAccumulator(str(folder.tensorboard)).Reload()
    assert [event.step for event in read.Images("confusion matrix")] == [1, 3]
    assert len(read.Scalars("epoch/val_top1")) == 3


def test_confusion_picture_has_true_classes_as_rows_and_shades_by_their_shares():
    picture = confusion_picture(torch.tensor([[3, 1], [0, 4]]), ["cat", "dog"])
    cells = picture[:60, -60:]
    corners = cells[2::30, 2::30].astype(int)
    light, dark = np.array([247, 251, 255]), np.array([8, 48, 107])
    expected = light + np.array([[0.75, 0.25], [0.0, 1.0]])[..., None] * (dark - light)
    np.testing.assert_allclose(corners, expected, atol=1)
    assert (cells[30:, :30].min(2) < 100).any(), "the 0 is written in black"
    assert (cells[30:, 30:].min(2) > 200).any(), "the 4 in white"
    other = confusion_picture(torch.tensor([[3, 1], [0, 4]]), ["cow", "dog"])
    rows, columns, _ = np.nonzero(picture != other)
    assert rows.max() < 30
    assert columns.max() < picture.shape[1] - 60


def test_a_large_confusion_picture_has_cells_only():
    confusion = torch.eye(150, dtype=torch.int64)
    picture = confusion_picture(confusion, [str(number) for number in range(150)])
    dark = (picture[: 4 * 150, -4 * 150 :] == [8, 48, 107]).all(2)
    np.testing.assert_array_equal(dark, np.kron(np.eye(150), np.ones((4, 4))) > 0)
