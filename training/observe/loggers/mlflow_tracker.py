"""MLflow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from training.observe.loggers.tracker_process import PROJECT, TrackedRun

# Before the import: a request to a server that is not there would be repeated for minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

import mlflow
from mlflow.exceptions import MlflowException
from PIL import Image

STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
LONGEST_VALUE = 6000  # characters
LONGEST_TAG = 5000


class MlflowRun:
    """A run on the server of MLFLOW_TRACKING_URI, or in <log folder>/mlflow.

    What MLflow has, it keeps: steps that are run again have two values, of which it shows the later one as the latest.
    """

    def __init__(self, run: TrackedRun) -> None:
        place = None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            folder = (run.log_dir / "mlflow").resolve()
            folder.mkdir(exist_ok=True)
            mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
            place = (folder / "artifacts").as_uri()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if mlflow.get_experiment_by_name(experiment) is None:
            with contextlib.suppress(MlflowException):  # another run was first
                mlflow.create_experiment(experiment, place)
        mlflow.set_experiment(experiment)
        started = mlflow.start_run(run.known_as, run_name=run.name, log_system_metrics=True)
        self.known_as = started.info.run_id
        if run.known_as is None:  # they are what they are: MLflow refuses others
            mlflow.log_params({key: str(value)[:LONGEST_VALUE] for key, value in run.config.items()})

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        mlflow.log_metrics(dict(values), step)

    def alert(self, title: str, text: str) -> None:
        mlflow.set_tag(title, text[:LONGEST_TAG])

    def picture(self, name: str, path: Path, step: int) -> None:
        with Image.open(path) as picture:
            mlflow.log_image(picture, key=name, step=step)

    def file(self, path: Path, kind: str) -> None:
        mlflow.log_artifact(str(path))

    def close(self, status: str) -> None:
        mlflow.end_run(STATUS[status])


open_run = MlflowRun
