"""Trackers such as Weights & Biases: a process of its own feeds each, `training.observe.loggers.tracker_process`.

A tracker's library imports for seconds, waits for networks and catches signals. Here is what a step sees of it: a dict
that is put into a queue, or dropped if the queue is full.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from training.base.points import EpochPoint, RunPoint, StepPoint
from training.base.run_folder import TRACKERS, RunFolder
from training.base.run_logger import RunLogger
from training.base.settings import REPO_ROOT
from training.observe.loggers.scalars import epoch_scalars, run_scalars, step_scalars

MOST_WAITING = 1000  # lines
ENDING_SECONDS = 120.0  # that a run which has ended waits for its tracker
ALERTS = ("checkpoint_failed", "diverged", "gave_up")


class TrackerLogger(RunLogger):
    """Writes what a run says to a tracker's process; nothing here waits before the run's end.

    Args:
        name: of `training.observe.settings.TRACKERS`.
        folder: of the run.
        config: the run's settings.
        first_step: steps from there on that were logged before are void.

    Raises:
        OSError: The folder of its log cannot be written, or no process started.
    """

    def __init__(self, name: str, folder: RunFolder, config: Mapping[str, Any], first_step: int) -> None:
        self._name, self._dropped, self._is_done, self._status = name, 0, False, "finished"
        place = folder.path / TRACKERS
        place.mkdir(exist_ok=True)
        paths = [str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with (place / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "training.observe.loggers.tracker_process", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
                start_new_session=True,  # no Ctrl-C: it ends with what it reads
            )
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._teller = threading.Thread(target=self._tell, daemon=True)
        self._teller.start()
        threading.Thread(target=self._feed, daemon=True).start()
        self._send(kind="open", log_dir=str(folder.log_dir), run=folder.name, config=config, first_step=first_step)

    def event(self, kind: str, values: dict[str, Any]) -> None:
        """Draw an event's numbers, and report what a person should know at once."""
        step = values.get("step", 0)
        numbers = {key: value for key, value in values.items() if key != "step" and type(value) in (int, float)}
        self._send_scalars({f"{kind}/{key}": value for key, value in numbers.items()}, step)
        if kind in ALERTS:
            self._send(kind="alert", title=kind, text=json.dumps(values, default=str))
        if kind == "gave_up":
            self._status = "failed"

    def steps(self, point: StepPoint) -> None:
        self._send_scalars({"epoch": point.epoch} | step_scalars(point), point.step)

    def epoch(self, point: EpochPoint) -> None:
        self._send_scalars({"epoch": point.epoch} | epoch_scalars(point), point.step)

    def end(self, point: RunPoint) -> None:
        self._send_scalars(run_scalars(point), point.step)

    def delivered(self) -> None:
        """Let it take the run's files; wait until it has, but not for ever."""
        if self._is_done:
            return
        self._is_done = True
        deadline = time.monotonic() + ENDING_SECONDS
        try:
            self._lines.put({"kind": "close", "status": self._status}, timeout=ENDING_SECONDS)
            self._lines.put(None, timeout=ENDING_SECONDS)
            self._process.wait(deadline - time.monotonic())
        except (queue.Full, subprocess.TimeoutExpired):
            self._process.kill()
            self._note(f"not all sent in {ENDING_SECONDS:.0f} s: the run's folder has it")
        self._teller.join(1)
        if self._dropped:
            self._note(f"{self._dropped} lines were dropped: metrics.jsonl has them")

    def close(self) -> None:
        """End the process of a run that has delivered nothing."""
        self.delivered()

    def _send_scalars(self, values: Mapping[str, float | None], step: int) -> None:
        if known := {tag: value for tag, value in values.items() if value is not None}:
            self._send(kind="scalars", values=known, step=step)

    def _send(self, **line: Any) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._note(f"{MOST_WAITING} lines wait for it: it takes no more for now, training goes on")

    def _feed(self) -> None:
        """Write lines to the process; in a thread."""
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                while (line := self._lines.get()) is not None:
                    pipe.write(json.dumps(line, default=str).encode() + b"\n")
                    pipe.flush()
        except OSError:  # the process has ended, and has said why
            while self._lines.get() is not None:
                pass

    def _tell(self) -> None:
        """Print what the process has to say; in a thread."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._note(line.decode(errors="replace").rstrip())

    def _note(self, text: str) -> None:
        print(f"note: {self._name}: {text}", file=sys.stderr, flush=True)
