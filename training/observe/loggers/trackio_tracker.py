"""Trackio."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from training.observe.loggers.tracker_process import PROJECT, TrackedRun


class TrackioRun:
    """A run in the SQLite files of TRACKIO_DIR, or of <log folder>/trackio, or where Trackio's other variables say.

    Trackio appends: steps that are run again have two values.
    """

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.log_dir.resolve() / "trackio"))  # read by the import
        import trackio

        self._trackio = trackio
        self.known_as = run.name
        trackio.init(
            os.environ.get("TRACKIO_PROJECT", PROJECT),
            run.name,
            config=dict(run.config),
            resume="allow" if run.known_as else "never",
            embed=False,
        )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(values), step)

    def alert(self, title: str, text: str) -> None:
        self._trackio.alert(title, text, level=self._trackio.AlertLevel.ERROR)

    def picture(self, name: str, path: Path, step: int) -> None:
        self._trackio.log({name: self._trackio.Image(str(path))}, step)

    def file(self, path: Path, kind: str) -> None:
        self._trackio.log_artifact(path, kind, kind)

    def close(self, status: str) -> None:
        self._trackio.finish()


open_run = TrackioRun
