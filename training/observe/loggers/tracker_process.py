"""The process that feeds one tracker: it reads a run's lines from its standard input, and prints notes.

It outlives Ctrl-C and a killed trainer, whose run it marks as killed. What the tracker's library raises is one note.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from training.base.errors import one_line
from training.base.run_folder import (
    CARD,
    CONFIG,
    ENVIRONMENT,
    EVALUATION,
    METRICS,
    REPORT,
    TEST_EVALUATION,
    TRACKERS,
    WEIGHTS,
    WORST,
    RunFolder,
)

PROJECT = "zerovision"  # unless the tracker's own variable names another
SECONDS_AFTER_TRAINER = 60.0  # that it has to end in if the trainer is gone
# What a tracker is given of the run's folder, by the kind that it shows.
FILES = {
    "config": CONFIG,
    "environment": ENVIRONMENT,
    "metrics": METRICS,
    "evaluation": EVALUATION,
    "evaluation-test": TEST_EVALUATION,
    "card": CARD,
    "report": REPORT,
    "model": WEIGHTS,
}
PICTURES = {"confusion matrix": "confusion.png", "worst images": f"{WORST}.png"}


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker gets to know it.

    Attributes:
        name: of the run.
        log_dir: folder of all logs, in which a tracker that needs a place on the disk has one, if the user named none.
        config: the run's settings.
        known_as: what the tracker called the run when it was started before; None for a new one.
        first_step: of a run that was started before: later steps are logged again.
    """

    name: str
    log_dir: Path
    config: Mapping[str, Any]
    known_as: str | None
    first_step: int


class Tracker(Protocol):
    """A run in a tracker, made of a `TrackedRun`; any method may raise any exception.

    Attributes:
        known_as: by which the tracker finds the run again.
    """

    known_as: str

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers."""

    def alert(self, title: str, text: str) -> None:
        """Report something that a person should know."""

    def picture(self, name: str, path: Path, step: int) -> None:
        """Show a picture."""

    def file(self, path: Path, kind: str) -> None:
        """Keep a file or folder; `kind` is a key of `FILES`."""

    def close(self, status: str) -> None:
        """End with 'finished', 'failed' or 'killed'."""


class Notes:
    """Tells the first thing that goes wrong, on what was this process's standard output; the library says much more."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        self._is_told = False
        os.dup2(2, 1)

    def attempt(self, action: Callable[..., object], *values: Any) -> None:
        """Do what may raise anything."""
        try:
            action(*values)
        except Exception as error:
            self.tell(error, "some of it is missing there")

    def tell(self, error: Exception, means: str) -> None:
        """Print one line about the first error."""
        if not self._is_told:
            self._is_told = True
            self._out.write(f"{type(error).__name__}: {one_line(error, 300)}: {means}, training goes on\n")


def main(name: str) -> None:
    """Feed a tracker until the trainer says that it has ended, or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    notes = Notes()
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    first = json.loads(sys.stdin.readline())
    folder = RunFolder(Path(first["log_dir"]), first["run"])
    memory = folder.path / TRACKERS / f"{name}.json"
    try:
        known_as = json.loads(memory.read_text()) if memory.exists() else None
        module = importlib.import_module(f"training.observe.loggers.{name}_tracker")
        tracker: Tracker = module.open_run(
            TrackedRun(folder.name, folder.log_dir, first["config"], known_as, first["first_step"])
        )
    except Exception as error:
        notes.tell(error, "the run is not there")
        os._exit(1)  # without waiting for whatever the library has begun
    notes.attempt(memory.write_text, json.dumps(tracker.known_as))
    last_step, status = first["first_step"], "killed"
    for text in sys.stdin:
        try:
            line = json.loads(text)
        except ValueError:  # of a trainer that was killed
            break
        if line["kind"] == "scalars":
            last_step = line["step"]
            notes.attempt(tracker.scalars, line["values"], last_step)
        elif line["kind"] == "alert":
            notes.attempt(tracker.alert, line["title"], line["text"])
        else:
            status = line["status"]
            _hand_over(tracker, folder, last_step, notes)
    notes.attempt(tracker.close, status)


def _hand_over(tracker: Tracker, folder: RunFolder, step: int, notes: Notes) -> None:
    """Give a tracker what a run has left."""
    for name, file in PICTURES.items():
        path = folder.path / EVALUATION / file
        if path.exists():
            notes.attempt(tracker.picture, name, path, step)
    for kind, name in FILES.items():
        path = folder.path / name
        if path.exists():
            notes.attempt(tracker.file, path, kind)


def _end_after(trainer: int) -> None:
    """End this process some time after its trainer, whatever the library waits for; in a thread."""
    while os.getppid() == trainer:
        time.sleep(1)
    time.sleep(SECONDS_AFTER_TRAINER)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
