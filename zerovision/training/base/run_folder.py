"""Where the files of a run and of the package are, in a checkout and in an installed copy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
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


PACKAGE = Path(__file__).absolute().parents[2]  # not resolved: models/ is a link
# None: an installed copy.
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "scripts" / "train_distributed.py").is_file() else None
SHARED_MEMORY = Path("/dev/shm")  # of all processes of a machine
REPO_ROOT = CHECKOUT or PACKAGE  # with requirements.txt and deepspeed_configs/
ENTRIES = CHECKOUT / "scripts" if CHECKOUT else PACKAGE / "commands"
LAUNCH = PACKAGE / "launch"
PRESET_FOLDER = PACKAGE / "presets"
TYPED = "ZEROVISION_COMMAND"  # set by the command `zerovision`, for its ranks too
SCRIPTS = {"audit": "audit_data", "bisect": "bisect_runs"}  # of verbs with another name
VERBS = {script: verb for verb, script in SCRIPTS.items()}
EXTRAS = {  # of pyproject.toml, and the modules in them that are imported where they are needed
    "deepspeed": ("deepspeed",),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "audit": ("sklearn",),
    "lora": ("peft",),
    "parquet": ("pyarrow",),
    "remote": ("fsspec", "aiohttp"),
}
TRAINER = "-m zerovision.commands.train_distributed"
AS_A_COMMAND: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [  # in a checkout, and otherwise
    (r"bash (?:scripts/)?(?:launch_distributed|launch_multi_node)\.sh", "zerovision launch"),
    (r"(deepspeed .*?)scripts/train_distributed\.py", r"\1--module zerovision.commands.train_distributed"),
    (r"((?:torchrun|accelerate launch) .*?)scripts/train_distributed\.py", rf"\1{TRAINER}"),
    (r"(?:python )?scripts/train_distributed\.py", f"python {TRAINER}"),
    (r"(torchrun .*?)scripts/(\w+)\.py", r"\1-m zerovision.commands \2"),
    (r"(?:python )?scripts/(\w+)\.py", lambda found: f"zerovision {VERBS.get(found[1], found[1])}"),
    (r"(?:scripts/)?(?:launch_distributed|launch_multi_node)\.sh", "zerovision launch"),
]


def as_typed(text: str) -> str:
    """Return a text with its commands in the form for this copy: `zerovision evaluate`, or a checkout's script."""
    if not CHECKOUT or os.environ.get(TYPED):
        for script, command in AS_A_COMMAND:
            text = re.sub(script, command, text)
    return text


def cure_of_missing(module: str) -> str:
    """Return what to type if a module cannot be imported; for an installed copy, the extra that contains it."""
    if CHECKOUT:
        return "run 'make setup', and use .venv/bin/python instead of python"
    extra = next((name for name, modules in EXTRAS.items() if module.partition(".")[0] in modules), "")
    return f"pip install '{f'zerovision[{extra}]' if extra else module}'"


def log_folder() -> Path:
    """Return the folder for the files of runs: logs/ in the checkout, or in the current folder."""
    return (CHECKOUT or Path.cwd()) / "logs"
