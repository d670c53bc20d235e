"""What reaches the console, the files and TensorBoard's figure."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from training.loggers import EpochPoint, StepPoint, duration
from training.loggers.console import ConsoleLogger
from training.loggers.files import JsonLinesLogger, TextLogger
from training.loggers.tensorboard import confusion_figure
from training.metrics import Scores
from training.run_folder import RunFolder

STEP = StepPoint(
    epoch=2,
    step=13,
    steps_per_epoch=10,
    total_steps=50,
    loss=0.5,
    learning_rate=0.001,
    images_per_second=321.0,
    data_wait_share=0.125,
    seconds_left=75.0,
    gradient_norm=1.5,
    skipped_steps=0,
    memory_bytes=1000,
)
EPOCH = EpochPoint(
    epoch=2,
    step=20,
    epochs=5,
    train_loss=0.4,
    train_top1=0.8,
    validation=Scores(0.3, 0.9, 0.99, 360, torch.eye(2, dtype=torch.int64)),
    images_per_second=300.0,
    data_wait_share=0.1,
    seconds=5.0,
    is_best=True,
    class_names=["cat", "dog"],
)


def console_output(mode, is_terminal):
    logger = ConsoleLogger(mode)
    stream = io.StringIO()
    logger._console = Console(file=stream, force_terminal=is_terminal, width=140, highlight=False)
    logger._use_bar = is_terminal and mode != "lines"
    logger.on_steps(STEP)
    logger.on_epoch(EPOCH)
    logger.close()
    return stream.getvalue()


def test_a_terminal_gets_a_bar():
    shown = console_output("auto", is_terminal=True)
    for word in ("epoch 2", "3/10", "loss 0.5000", "lr 0.001", "321 images/s", "data wait 12.5%", "left 1m15s"):
        assert word in shown
    assert "━" in shown


def test_a_file_gets_plain_lines():
    shown = console_output("auto", is_terminal=False)
    assert "\x1b" not in shown
    assert shown == (
        "epoch 2/5  train loss 0.4000  val loss 0.3000  top-1 0.9000  top-5 0.9900  300 images/s  5.0 s  best\n"
    )


def test_files_hold_the_numbers(tmp_path):
    folder = RunFolder(tmp_path, "run")
    folder.path.mkdir(parents=True)
    for logger in (TextLogger(folder), JsonLinesLogger(folder)):
        logger.on_message("hello")
        logger.on_steps(STEP)
        logger.on_epoch(EPOCH)
        logger.close()
    text = folder.text_log.read_text()
    assert text.count("\n") == 3
    assert "run hello" in text
    step, epoch = (json.loads(line) for line in folder.metrics.read_text().splitlines())
    assert (step["kind"], step["loss"], step["gradient_norm"]) == ("step", 0.5, 1.5)
    assert (epoch["kind"], epoch["val_top1"], epoch["val_samples"]) == ("epoch", 0.9, 360)


def test_confusion_figure_has_true_classes_as_rows():
    figure = confusion_figure(torch.tensor([[3, 1], [0, 4]]), ["cat", "dog"])
    axes = figure.axes[0]
    assert axes.get_ylabel() == "true class"
    assert axes.images[0].get_array()[0, 1] == pytest.approx(0.25)
    assert [text.get_text() for text in axes.texts] == ["3", "1", "0", "4"]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (200, "3m20s"), (7500, "2h05m")])
def test_durations(seconds, text):
    assert duration(seconds) == text
