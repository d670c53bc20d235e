"""A run in each tracker, reopened by `known_as` after a resume; methods may raise any error of the tracker's library.

Each writes where its library's variables say, or else into the folder of all logs. `picture` and `file` get the run's
final files; `close` gets 'finished', 'failed' or 'killed'; `refused` names the settings that the tracker refused.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from zerovision.training.base.run_folder import RunFolder

PROJECT = "zerovision"
OPENING_SECONDS = 60
LONGEST_VALUE, LONGEST_TAG = 6000, 5000  # characters, of MLflow


class WandbRun:
    """Weights & Biases: on the server of `wandb login`, or with WANDB_MODE=offline in <log folder>/wandb."""

    refused: Sequence[str] = ()

    def __init__(self, folder: RunFolder, config: dict[str, Any], known_as: str | None, first_step: int) -> None:
        import wandb

        self._wandb, self.known_as = wandb, known_as or f"{folder.name}-{uuid.uuid4().hex[:8]}"
        settings: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", PROJECT),
            "id": self.known_as,
            "name": folder.name,
            "dir": os.environ.get("WANDB_DIR", str(folder.log_dir)),
            "config": config,
            # Its measurements of CPU, GPU, memory and disk are those of the trainer.
            "settings": wandb.Settings(console="off", init_timeout=OPENING_SECONDS, x_stats_pid=os.getppid()),
        }
        try:
            rewind = {"resume_from": f"{known_as}?_step={first_step}"} if known_as else {}
            self._run = wandb.init(**settings, **rewind)
        except wandb.Error:
            if known_as is None:
                raise
            # Not every server rewinds. One that only appends ignores the steps that it has, which are the same again.
            self._run = wandb.init(**settings, resume="allow")

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def alert(self, title: str, text: str) -> None:
        self._run.alert(title, text, level=self._wandb.AlertLevel.ERROR)

    def picture(self, name: str, path: Path, step: int) -> None:
        self._run.log({name: self._wandb.Image(str(path))}, step=step)

    def file(self, path: Path) -> None:
        self._run.log_artifact(str(path), name=f"{self.known_as[:100]}-{path.stem}", type=path.stem)
        if path.suffix == ".html":
            self._run.log({path.stem: self._wandb.Html(str(path))})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MlflowRun:
    """MLflow: on the server of MLFLOW_TRACKING_URI, or in <log folder>/mlflow; steps that are run again stay."""

    refused: Sequence[str] = ()

    def __init__(self, folder: RunFolder, config: dict[str, Any], known_as: str | None, first_step: int) -> None:
        # Before the import: a request to a server that is not there would be repeated for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        import mlflow

        self._mlflow, artifacts = mlflow, None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            own = (folder.log_dir / "mlflow").resolve()
            own.mkdir(exist_ok=True)
            mlflow.set_tracking_uri(f"sqlite:///{own}/mlflow.db")
            artifacts = (own / "artifacts").as_uri()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if mlflow.get_experiment_by_name(experiment) is None:
            with contextlib.suppress(mlflow.MlflowException):  # another run was first
                mlflow.create_experiment(experiment, artifacts)
        mlflow.set_experiment(experiment)
        self.known_as = mlflow.start_run(known_as, run_name=folder.name, log_system_metrics=True).info.run_id
        if known_as is None:  # of a run that has some MLflow refuses others
            end = time.monotonic() + OPENING_SECONDS
            self.refused = self._set({key: str(value)[:LONGEST_VALUE] for key, value in config.items()}, end)

    def _set(self, parameters: dict[str, str], end: float) -> list[str]:
        """Log parameters, and return those refused; a server accepts a batch completely or not at all."""
        try:
            self._mlflow.log_params(parameters)
        except self._mlflow.MlflowException:
            if len(parameters) == 1 or time.monotonic() > end:
                return [*parameters]
            pairs = [*parameters.items()]
            halves = (pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :])
            return [name for half in halves for name in self._set(dict(half), end)]
        return []

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(values, step)

    def alert(self, title: str, text: str) -> None:
        self._mlflow.set_tag(title, text[:LONGEST_TAG])

    def picture(self, name: str, path: Path, step: int) -> None:
        with Image.open(path) as picture:
            self._mlflow.log_image(picture, key=name, step=step)

    def file(self, path: Path) -> None:
        self._mlflow.log_artifact(str(path))

    def close(self, status: str) -> None:
        self._mlflow.end_run(status.upper())


class TrackioRun:
    """Trackio: in the files of <log folder>/trackio; steps that are run again stay."""

    refused: Sequence[str] = ()

    def __init__(self, folder: RunFolder, config: dict[str, Any], known_as: str | None, first_step: int) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder.log_dir.resolve() / "trackio"))  # read by the import
        import trackio

        self._trackio, self.known_as = trackio, folder.name
        project, resume = os.environ.get("TRACKIO_PROJECT", PROJECT), "allow" if known_as else "never"
        trackio.init(project, folder.name, config=config, resume=resume, embed=False)

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._trackio.log(values, step)

    def alert(self, title: str, text: str) -> None:
        self._trackio.alert(title, text, level=self._trackio.AlertLevel.ERROR)

    def picture(self, name: str, path: Path, step: int) -> None:
        self._trackio.log({name: self._trackio.Image(str(path))}, step)

    def file(self, path: Path) -> None:
        self._trackio.log_artifact(path, path.stem, path.stem)

    def close(self, status: str) -> None:
        self._trackio.finish()


TRACKER_RUNS: dict[str, Any] = {"wandb": WandbRun, "mlflow": MlflowRun, "trackio": TrackioRun}
