"""Where a run's files are: logs/training.log, logs/tensorboard/<run>/ and logs/runs/<run>/."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

# In a run's own folder.
CONFIG, ENVIRONMENT = "config.json", "environment.json"
METRICS, WEIGHTS = "metrics.jsonl", "model.safetensors"
CHOICE = "choice.txt"  # what `train` has chosen, and why
LEARNING_RATE, BATCH_SIZE = "learning_rate.json", "batch_size.json"  # of searches for them
IMAGES = "images.csv.gz"  # what was trained on
EVALUATION, TEST_EVALUATION = "evaluation", "evaluation-test"
EXPORT, CHECKPOINTS = "export", "checkpoints"
TRACKERS = "trackers"  # folder: of each tracker, the run's name there and what its library says
REPORT, CARD = "report.html", "README.md"
# In its folder of checkpoints.
LAST = "last"  # names the newest
# In its evaluation folder.
SCORES = "scores.json"
TYPICAL = "typical"  # folder of one sample of each class, as `WORST`
WHY = "-why"  # after the number of a sample: what counted in its picture
WORST = "worst"  # folder of the worst samples, one picture each


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run; its other files are `path / CONFIG` and so on.

    Attributes:
        log_dir: the log folder of all runs.
        name: the run's name.
        made: the folders among these that this start created.
        lock: on rank 0, the file that locks the run's own folder while it is open.
    """

    log_dir: Path
    name: str
    made: tuple[Path, ...] = field(default=(), compare=False)
    lock: IO[bytes] | None = field(default=None, compare=False)

    @property
    def path(self) -> Path:
        """The run's own folder."""
        return self.log_dir / "runs" / self.name

    @property
    def text_log(self) -> Path:
        """The text log that all runs share."""
        return self.log_dir / "training.log"

    @property
    def tensorboard(self) -> Path:
        """The run's TensorBoard event files."""
        return self.log_dir / "tensorboard" / self.name

    @property
    def metrics(self) -> Path:
        """One JSON object per logging point and epoch."""
        return self.path / METRICS

    @property
    def weights(self) -> Path:
        """The trained model: the best epoch's weights."""
        return self.path / WEIGHTS

    @property
    def checkpoints(self) -> Path:
        """The checkpoints that a resume reads."""
        return self.path / CHECKPOINTS

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint of the run was saved."""
        return (self.checkpoints / LAST).exists()


def shown_path(path: Path) -> str:
    """Return a path relative to the current folder if it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def slug(name: str) -> str:
    """Return a name in a form that can be part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")
