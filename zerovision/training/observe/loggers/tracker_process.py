"""The process that feeds one tracker with events from its standard input.

It survives Ctrl-C and a killed trainer, whose run it marks as killed. The first error of the tracker's library becomes
one line on standard output; its other output goes to a log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerovision.training.base import run_folder as names
from zerovision.training.base.errors import one_line
from zerovision.training.observe.loggers.tracker_runs import TRACKER_RUNS

SECONDS_AFTER_TRAINER = 60.0  # that it has to end in if the trainer is gone
PREFIXES = {"step": "train", "end": "run"}  # of an event's numbers; else its kind
# Of an epoch's numbers those of the best one so far: what a tracker lists of a run is the last that it got.
BEST = ("epoch", "score", "val_loss", "val_top1", "val_top5")
ALERTS = ("checkpoint_failed", "diverged", "gave_up")  # what a person should know at once
FILES = (
    *(names.CONFIG, names.ENVIRONMENT, names.METRICS, names.EVALUATION, names.TEST_EVALUATION),
    *(names.CARD, names.REPORT, names.WEIGHTS),
)
PICTURES = {"confusion matrix": "confusion.png", "worst images": f"{names.WORST}.png"}


class Feeder:
    """Passes a run's events on to a tracker."""

    def __init__(self, name: str, folder: names.RunFolder) -> None:
        self._has_failed, self._folder, self._out = False, folder, os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._run = self._attempt(self._open, name, means="the run is not there")
        if self._has_failed:
            os._exit(1)  # without waiting for whatever the library has begun

    def _open(self, name: str) -> Any:
        """Open a run in a tracker, the same one as before if the run was started before."""
        first = json.loads(sys.stdin.readline())
        memory = self._folder.path / names.TRACKERS / f"{name}.json"
        known_as = json.loads(memory.read_text()) if memory.exists() else None
        run = TRACKER_RUNS[name](self._folder, first["config"], known_as, first["first_step"])
        memory.write_text(json.dumps(run.known_as))
        if run.refused:
            self._out.write(f"it rejected the values of {', '.join(run.refused)}; all others are there\n")
        return run

    def feed(self) -> None:
        """Pass events on until the trainer reports the end of the run, or is gone."""
        step, status = 0, "killed"
        for text in sys.stdin:
            if not text.endswith("\n"):  # of a trainer that was killed
                break
            event = json.loads(text)
            kind = event.pop("kind")
            if kind == "close":
                status = "failed" if status == "failed" else "finished"
                self._hand_over(step)
                break
            step = event.pop("step", step)
            numbers = dict(_numbers(event, PREFIXES.get(kind, kind)))
            if event.get("is_best"):
                numbers |= {f"best_{name}": event[name] for name in BEST}
            if numbers:
                self._attempt(self._run.scalars, numbers, step)
            if kind in ALERTS:
                self._attempt(self._run.alert, kind, json.dumps(event))
            status = "failed" if kind == "gave_up" else status
        self._attempt(self._run.close, status)

    def _hand_over(self, step: int) -> None:
        """Give the tracker the run's final files."""
        for name, file in PICTURES.items():
            if (path := self._folder.path / names.EVALUATION / file).exists():
                self._attempt(self._run.picture, name, path, step)
        for file in FILES:
            if (path := self._folder.path / file).exists():
                self._attempt(self._run.file, path)

    def _attempt(self, action: Any, *values: Any, means: str = "some of it is missing there") -> Any:
        """Call a function that may raise any error, and return its result."""
        try:
            return action(*values)
        except Exception as error:
            if not self._has_failed:
                self._out.write(f"{type(error).__name__}: {one_line(error, 300)}: {means}, training goes on\n")
            self._has_failed = True


def _numbers(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}/{key}")
        elif type(value) in (int, float):
            yield f"{prefix}/{key}", value


def _end_after(trainer: int) -> None:
    """End this process some time after its trainer, even if the library is waiting; in a thread."""
    while os.getppid() == trainer:
        time.sleep(1)
    time.sleep(SECONDS_AFTER_TRAINER)
    os._exit(1)


def main(name: str, log_dir: str, run: str) -> None:
    """Feed a tracker with the run of this name."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    Feeder(name, names.RunFolder(Path(log_dir), run)).feed()


if __name__ == "__main__":
    main(*sys.argv[1:])
