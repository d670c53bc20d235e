"""Where the files of a run and of the package are, in a checkout and in an installed copy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

# Names in a run's own folder.
CONFIG, ENVIRONMENT = "config.json", "environment.json"
METRICS, WEIGHTS = "metrics.jsonl", "model.safetensors"
CHOICE = "choice.txt"  # the settings that `train` chose, and why
LEARNING_RATE, BATCH_SIZE = "learning_rate.json", "batch_size.json"  # results of the searches for them
IMAGES = "images.csv.gz"  # the images of the run
EVALUATION, TEST_EVALUATION = "evaluation", "evaluation-test"
EXPORT, CHECKPOINTS = "export", "checkpoints"
TRACKERS = "trackers"  # folder: for each tracker, its name for the run and the output of its library
REPORT, CARD = "report.html", "README.md"
# Names in the folder of checkpoints.
LAST = "last"  # file with the name of the newest checkpoint
# Names in the evaluation folder.
SCORES = "scores.json"
TYPICAL = "typical"  # folder with a picture of one sample per class
WHY = "-why"  # suffix after the number of a sample: a picture of the parts that led to its predicted class
WORST = "worst"  # folder with a picture of each of the worst samples


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run; its other files are `path / CONFIG` and so on.

    Attributes:
        log_dir: the log folder that all runs share.
        name: the run's name.
        made: the folders that this start created.
        lock: on rank 0, the file that locks the run's own folder while the file is open.
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
        """The folder of the run's TensorBoard event files."""
        return self.log_dir / "tensorboard" / self.name

    @property
    def metrics(self) -> Path:
        """The file with one JSON object per logging point and epoch."""
        return self.path / METRICS

    @property
    def weights(self) -> Path:
        """The file of the trained model, with the best epoch's weights."""
        return self.path / WEIGHTS

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints that a resume reads."""
        return self.path / CHECKPOINTS

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint of the run was saved."""
        return (self.checkpoints / LAST).exists()


def shown_path(path: Path) -> str:
    """Return a path as text, relative to the current folder for a path inside it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def slug(name: str) -> str:
    """Return a name in a form that can be part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")


PACKAGE = Path(__file__).absolute().parents[2]  # not resolved: models/ is a link
# None in an installed copy.
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "scripts" / "train_distributed.py").is_file() else None
SHARED_MEMORY = Path("/dev/shm")  # shared by all processes on a machine
REPO_ROOT = CHECKOUT or PACKAGE  # contains requirements.txt and deepspeed_configs/
ENTRIES = CHECKOUT / "scripts" if CHECKOUT else PACKAGE / "commands"
LAUNCH = PACKAGE / "launch"
PRESET_FOLDER = PACKAGE / "presets"
TYPED = "ZEROVISION_COMMAND"  # set by the `zerovision` command, also for its ranks
SCRIPTS = {"audit": "audit_data", "bisect": "bisect_runs"}  # scripts whose subcommand has a different name
VERBS = {script: verb for verb, script in SCRIPTS.items()}
EXTRAS = {  # in pyproject.toml, with those of their modules that are imported only when needed
    "deepspeed": ("deepspeed",),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "audit": ("sklearn",),
    "lora": ("peft",),
    "parquet": ("pyarrow",),
    "remote": ("fsspec", "aiohttp"),
}
TRAINER = "-m zerovision.commands.train_distributed"
AS_A_COMMAND: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [  # in a checkout, and in an installed copy
    (r"bash (?:scripts/)?(?:launch_distributed|launch_multi_node)\.sh", "zerovision launch"),
    (r"(deepspeed .*?)scripts/train_distributed\.py", r"\1--module zerovision.commands.train_distributed"),
    (r"((?:torchrun|accelerate launch) .*?)scripts/train_distributed\.py", rf"\1{TRAINER}"),
    (r"(?:python )?scripts/train_distributed\.py", f"python {TRAINER}"),
    (r"(torchrun .*?)scripts/(\w+)\.py", r"\1-m zerovision.commands \2"),
    (r"(?:python )?scripts/(\w+)\.py", lambda found: f"zerovision {VERBS.get(found[1], found[1])}"),
    (r"(?:scripts/)?(?:launch_distributed|launch_multi_node)\.sh", "zerovision launch"),
]


def as_typed(text: str) -> str:
    """Return a text with its commands as the user can type them: `zerovision evaluate`, or a script of the checkout."""
    if not CHECKOUT or os.environ.get(TYPED):
        for script, command in AS_A_COMMAND:
            text = re.sub(script, command, text)
    return text


def cure_of_missing(module: str) -> str:
    """Return what to type if a module is missing; in an installed copy, the command installs the module's extra."""
    if CHECKOUT:
        return "run 'make setup', and use .venv/bin/python instead of python"
    extra = next((name for name, modules in EXTRAS.items() if module.partition(".")[0] in modules), "")
    return f"pip install '{f'zerovision[{extra}]' if extra else module}'"


def log_folder() -> Path:
    """Return the folder for the files of runs: logs/ in the checkout, or in the current folder."""
    return (CHECKOUT or Path.cwd()) / "logs"
