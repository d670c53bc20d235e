"""Weights & Biases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import wandb

from training.observe.loggers.tracker_process import PROJECT, TrackedRun

OPENING_SECONDS = 60
LONGEST_RUN_NAME = 100  # characters in an artifact's name, which may have 128


class WandbRun:
    """A run on the server that the login names, or with WANDB_MODE=offline in <log folder>/wandb."""

    def __init__(self, run: TrackedRun) -> None:
        self.known_as = run.known_as or f"{run.name}-{uuid.uuid4().hex[:8]}"
        self._name = run.name[:LONGEST_RUN_NAME]
        rewind, resume = {"resume_from": f"{self.known_as}?_step={run.first_step}"}, {"resume": "allow"}
        try:
            self._run = self._open(run, rewind if run.known_as else {})
        except wandb.Error:
            if not run.known_as:
                raise
            # Not every server rewinds. One that only appends ignores the steps that it has, which are the same again.
            self._run = self._open(run, resume)

    def _open(self, run: TrackedRun, how: Mapping[str, str]) -> wandb.Run:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.known_as,
            name=run.name,
            dir=os.environ.get("WANDB_DIR", str(run.log_dir)),
            config=dict(run.config),
            # Its measurements of CPU, GPU, memory and disk are those of the trainer.
            settings=wandb.Settings(console="off", init_timeout=OPENING_SECONDS, x_stats_pid=os.getppid()),
            **how,
        )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def alert(self, title: str, text: str) -> None:
        self._run.alert(title, text, level=wandb.AlertLevel.ERROR)

    def picture(self, name: str, path: Path, step: int) -> None:
        self._run.log({name: wandb.Image(str(path))}, step=step)

    def file(self, path: Path, kind: str) -> None:
        self._run.log_artifact(str(path), name=f"{self._name}-{kind}", type=kind)
        if kind == "report":
            self._run.log({kind: wandb.Html(str(path))})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


open_run = WandbRun
