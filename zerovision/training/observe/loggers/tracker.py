"""Sends events to trackers such as Weights & Biases, each through its own process; see `loggers.tracker_process`.

A tracker's library takes seconds to import, waits for the network and catches signals. A training step therefore only
puts a dict into a queue, or drops the dict if the queue is full.
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

from zerovision.training.base.run_folder import PACKAGE, TRACKERS, RunFolder
from zerovision.training.observe.loggers.text import EventLogger

MOST_WAITING = 1000  # events
ENDING_SECONDS = 120.0  # how long a run waits for its tracker at the end
MODULE = "zerovision.training.observe.loggers.tracker_process"


class TrackerLogger(EventLogger):
    """Passes events to a tracker's process; training does not wait for this process before the run's end.

    If the process's log cannot be written or the process cannot be started, OSError is raised.
    """

    def __init__(self, name: str, folder: RunFolder, config: Mapping[str, Any], first_step: int) -> None:
        self._name, self._dropped, self._is_done = name, 0, False
        place = folder.path / TRACKERS
        place.mkdir(exist_ok=True)
        path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
        with (place / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, name, str(folder.log_dir), folder.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                start_new_session=True,  # the process does not receive Ctrl-C, and ends when its input ends
            )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._teller = threading.Thread(target=self._tell, daemon=True)
        self._teller.start()
        threading.Thread(target=self._feed, daemon=True).start()
        self.event("open", {"config": config, "first_step": first_step})

    def event(self, kind: str, values: dict[str, Any]) -> None:
        try:
            self._events.put_nowait({"kind": kind, **values})
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._note(f"{MOST_WAITING} lines are waiting: further lines are dropped; training continues")

    def delivered(self) -> None:
        """Have the tracker's process send the run's files, and wait a limited time for it to end."""
        if self._is_done:
            return
        self._is_done = True
        deadline = time.monotonic() + ENDING_SECONDS
        try:
            for last in ({"kind": "close"}, None):
                self._events.put(last, timeout=ENDING_SECONDS)
            self._process.wait(deadline - time.monotonic())
        except (queue.Full, subprocess.TimeoutExpired):
            self._process.kill()
            self._note(f"not everything was sent in {ENDING_SECONDS:.0f} s: the run's folder has all of it")
        self._teller.join(1)
        if self._dropped:
            self._note(f"{self._dropped} lines were dropped: metrics.jsonl has them")

    def close(self) -> None:
        self.delivered()

    def _feed(self) -> None:
        """Write events to the process; runs in a thread."""
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                while (event := self._events.get()) is not None:
                    pipe.write(json.dumps(event, default=str).encode() + b"\n")
                    pipe.flush()
        except OSError:  # the process has ended and has printed why
            while self._events.get() is not None:
                pass

    def _tell(self) -> None:
        """Print the process's messages; runs in a thread."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._note(line.decode(errors="replace").rstrip())

    def _note(self, text: str) -> None:
        print(f"note: {self._name}: {text}", file=sys.stderr, flush=True)
