"""The settings for a run's output."""

from __future__ import annotations

import dataclasses
from typing import Literal

from zerovision.training.base.settings import option
from zerovision.training.checkpoint.settings import CheckpointSettings
from zerovision.training.engines.settings import EngineSettings
from zerovision.training.tasks.settings import TaskSettings

TRACKERS = ("wandb", "mlflow", "trackio")  # names of the packages


@dataclasses.dataclass(frozen=True)
class ObserveSettings(CheckpointSettings, TaskSettings, EngineSettings):
    """Settings for where a run's files go and what they contain."""

    run_name: str = option("", "Name of the run's folder; default: date, time, model and strategy.")
    log_dir: str = option("", "Folder for all logs; default: logs/ in the checkout, or in the current folder.")
    log_every_steps: int | Literal["auto"] = option(
        "auto", "Optimizer steps between log points; auto: 10, or more if 10 steps take less than a second.", low=1
    )
    log_hashes: int = option(
        0, "Number of steps between hashes of images and weights, for scripts/bisect_runs.py; 0: no hashes.", low=0
    )
    audit: int = option(0, "Steps between checks of one rank's gradients by another rank; 0: no checks.", low=0)
    progress: Literal["auto", "bar", "lines", "off"] = option(
        "auto", "Progress display in the console; auto: a bar in a terminal; off: only start, result and problems."
    )
    loggers: str = option(
        "tensorboard", "Where to send curves: any of tensorboard, wandb, mlflow and trackio, comma-separated; or none."
    )
    tensorboard: bool = option(True, "Write TensorBoard event files; false: never, whatever --loggers says.")
    report: bool = option(True, "When the run ends, write report.html, which shows the run on one page.")
    profile: int = option(
        0, "Number of steps of the first epoch to trace on rank 0 with torch.profiler; 0: no trace.", low=0, high=10_000
    )

    @property
    def destinations(self) -> list[str]:
        """The names in `loggers`, without tensorboard if it is turned off."""
        names = [name.strip() for name in self.loggers.split(",")]
        return [name for name in names if name != "none" and (name != "tensorboard" or self.tensorboard)]
