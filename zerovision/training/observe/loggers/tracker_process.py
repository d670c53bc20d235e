"""The process that sends events from its standard input to one tracker, and a class for a run in each tracker.

The process survives Ctrl-C and the death of the trainer, whose run it then marks as killed. The first error of the
tracker's library becomes one line on standard output; the library's other output goes to a log.

Each class writes to the place that its library's environment variables name, or by default into the folder of all logs.
`picture` and `file` receive the run's final files, `close` receives 'finished', 'failed' or 'killed', and `refused`
contains the names of the settings that the tracker rejected. Methods may raise any error of the tracker's library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from zerovision.training.base import run_folder as names
from zerovision.training.base.errors import one_line
from zerovision.training.base.run_folder import RunFolder

PROJECT = "zerovision"
OPENING_SECONDS = 60
LONGEST_VALUE, LONGEST_TAG = 6000, 5000  # characters; limits of MLflow


class WandbRun:
    """A run in Weights & Biases, on the server of `wandb login`, or with WANDB_MODE=offline in <log folder>/wandb."""

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
            # W&B then measures the CPU, GPU, memory and disk use of the trainer.
            "settings": wandb.Settings(console="off", init_timeout=OPENING_SECONDS, x_stats_pid=os.getppid()),
        }
        try:
            rewind = {"resume_from": f"{known_as}?_step={first_step}"} if known_as else {}
            self._run = wandb.init(**settings, **rewind)
        except wandb.Error:
            if known_as is None:
                raise
            # Not every server can rewind. A server that only appends ignores repeated steps, whose values are the same.
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
    """A run in MLflow, on the server of MLFLOW_TRACKING_URI, or in <log folder>/mlflow; repeated steps appear twice."""

    refused: Sequence[str] = ()

    def __init__(self, folder: RunFolder, config: dict[str, Any], known_as: str | None, first_step: int) -> None:
        # Set before the import, because requests to an unreachable server would be retried for minutes.
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
            with contextlib.suppress(mlflow.MlflowException):  # another run has just created it
                mlflow.create_experiment(experiment, artifacts)
        mlflow.set_experiment(experiment)
        self.known_as = mlflow.start_run(known_as, run_name=folder.name, log_system_metrics=True).info.run_id
        if known_as is None:  # MLflow rejects different values for parameters that a run already has
            end = time.monotonic() + OPENING_SECONDS
            self.refused = self._set({key: str(value)[:LONGEST_VALUE] for key, value in config.items()}, end)

    def _set(self, parameters: dict[str, str], end: float) -> list[str]:
        """Log parameters, and return the names of rejected ones; a server accepts a batch completely or not at all."""
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
    """A run in Trackio, in the files of <log folder>/trackio; repeated steps appear twice."""

    refused: Sequence[str] = ()

    def __init__(self, folder: RunFolder, config: dict[str, Any], known_as: str | None, first_step: int) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder.log_dir.resolve() / "trackio"))  # read at import
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


SECONDS_AFTER_TRAINER = 60.0  # within which this process must end after the trainer has ended
PREFIXES = {"step": "train", "end": "run"}  # of the names of an event's numbers; by default, the event's kind
# An epoch's numbers that are also sent as those of the best epoch so far, because trackers list the last value sent.
BEST = ("epoch", "score", "val_loss", "val_top1", "val_top5")
ALERTS = ("checkpoint_failed", "diverged", "gave_up")  # events that a person should learn about immediately
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
            os._exit(1)  # without waiting for anything that the library has started

    def _open(self, name: str) -> Any:
        """Open the run in the tracker, or reopen it if an earlier start has opened it."""
        first = json.loads(sys.stdin.readline())
        memory = self._folder.path / names.TRACKERS / f"{name}.json"
        known_as = json.loads(memory.read_text()) if memory.exists() else None
        run = TRACKER_RUNS[name](self._folder, first["config"], known_as, first["first_step"])
        memory.write_text(json.dumps(run.known_as))
        if run.refused:
            self._out.write(f"it rejected the values of {', '.join(run.refused)}; all others are there\n")
        return run

    def feed(self) -> None:
        """Pass events on until the trainer reports the end of the run or dies."""
        step, status = 0, "killed"
        for text in sys.stdin:
            if not text.endswith("\n"):  # the trainer was killed while writing the line
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
        """Send the run's final files to the tracker."""
        for name, file in PICTURES.items():
            if (path := self._folder.path / names.EVALUATION / file).exists():
                self._attempt(self._run.picture, name, path, step)
        for file in FILES:
            if (path := self._folder.path / file).exists():
                self._attempt(self._run.file, path)

    def _attempt(self, action: Any, *values: Any, means: str = "some of it is missing there") -> Any:
        """Call a function that may raise any error; return its result, or None after an error."""
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
    """End this process a while after the trainer has ended, even if the library is still waiting; runs in a thread."""
    while os.getppid() == trainer:
        time.sleep(1)
    time.sleep(SECONDS_AFTER_TRAINER)
    os._exit(1)


def main(name: str, log_dir: str, run: str) -> None:
    """Send the events of the run `run` to the tracker `name`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    Feeder(name, names.RunFolder(Path(log_dir), run)).feed()


if __name__ == "__main__":
    main(*sys.argv[1:])
