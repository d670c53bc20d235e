"""Settings of the commands in `zerovision.extras`, with their flags and help."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

from zerovision.delivery.settings import DEVICES, LARGEST_TOP_K, OF_DATASETS, OF_DEVICE, OF_MEGAPIXELS, ModelSettings
from zerovision.delivery.trained_model import find_model, find_run
from zerovision.models import TIMM_PREFIX
from zerovision.training.base.errors import UserError
from zerovision.training.config.command_settings import (
    END_OF_FLAGS,
    CommandSettings,
    choice,
    number,
    text,
    word,
    words_behind,
)
from zerovision.training.data.settings import MOST_MEGAPIXELS

MOST_STEPS, LARGEST_PORT = 10**9, 65535


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditSettings(CommandSettings):
    """Looks for mistakes in a data set: scenes that are in two parts or have two labels, and altered copies of images.

    python scripts/audit_data.py ~/photos                                  # writes logs/audits/photos
    python scripts/audit_data.py ~/photos --output ~/photos-audit
    python scripts/audit_data.py ~/photos --run photos                     # divided into parts as in that run
    python scripts/audit_data.py ~/photos --fixes logs/audits/photos/fixes.csv   # applies the fixes left in the file

    Writes audit.html, audit.json, fixes.csv and, for files, fixed.csv: the fixed data as a table of images. Exit code:
    0 if the audit succeeded, with or without findings, 2 for wrong arguments.
    """

    data: str = word("DATA", "Data set to audit: any value of the trainer's --data.")
    run: str = text(
        "Model to check labels with: a run (name or folder), whose split is kept, or timm:NAME with published weights."
    )
    data_root: str = text(OF_DATASETS)
    max_megapixels: int = number(0, 1, MOST_MEGAPIXELS, OF_MEGAPIXELS)
    fixes: str = text("Path of a fixes.csv, edited or not; the command then only writes the corrected table.")
    output: str = text("Folder for the files; default: logs/audits/DATA.")

    def look(self) -> None:
        """See `CommandSettings.look`."""
        if self.run and not self.run.startswith(TIMM_PREFIX):
            find_model(self.run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings(ModelSettings):
    """Serves a model as a web page on this machine: drop an image to see its labels and what led to the first label.

    python scripts/serve.py digits                       # prints the address; Ctrl-C stops the server
    python scripts/serve.py model.safetensors --port 0   # a free port

    The server listens only on 127.0.0.1 unless --host is given. It does not ask for a password.
    """

    host: str = text("Address or host name to listen on; default: only this machine.", default="127.0.0.1")
    port: int = number(8000, 0, LARGEST_PORT, "Port to listen on; 0: any free port.")
    top_k: int = number(5, 1, LARGEST_TOP_K, "Number of labels to show for each image.")
    device: str = choice("", DEVICES, OF_DEVICE)
    max_megapixels: int = number(0, 1, MOST_MEGAPIXELS, OF_MEGAPIXELS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplaySettings(CommandSettings):
    """Repeats one step of a run from the checkpoint before it, and shows the step's inputs and results.

    python scripts/replay.py digits --step 100      # writes logs/runs/digits/replay-100: batch.png, step.json

    Exit code: 0 if the bytes equal the run's or the run has no hashes (--log-hashes), 1 if the bytes differ, 2 for a
    mistake in the arguments.
    """

    run: str = word("RUN", "A run's name or folder, which is not changed.")
    step: int = number(None, 1, MOST_STEPS, "Optimizer step to repeat, counted from 1.")
    output: str = text("New folder for the files; default: replay-STEP in the run's folder.")

    def look(self) -> None:
        """See `CommandSettings.look`."""
        find_run(self.run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BisectSettings(CommandSettings):
    """Finds the first step at which two runs that should be equal differ, and lists other differences.

    bash scripts/launch_distributed.sh mobilenet ddp 2 16 2 --run-name a --log-hashes 10
    bash scripts/launch_distributed.sh mobilenet ddp 1 16 2 --run-name b --log-hashes 10 --gradient-accumulation-steps 2
    python scripts/bisect_runs.py a b

    Exit code: 0 if the runs are equal wherever both have hashes, 1 if they differ, 2 for a mistake in the arguments.
    """

    first: str = word("RUN", "A run's name or folder.")
    second: str = word("OTHER_RUN", "Name or folder of the run to compare.")

    def look(self) -> None:
        """See `CommandSettings.look`."""
        for run in (self.first, self.second):
            find_run(run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepSettings(CommandSettings):
    """Trains with several values of flags, from a grid or at random, and compares them; can stop weak trials early.

    python scripts/sweep.py rates --vary learning-rate=0.001,0.003,0.01 --vary seed=0,1 -- mobilenet ddp 2 16 12
    python scripts/sweep.py wide --vary learning-rate=0.0003..0.03:log --vary weight-decay=0..0.2 --trials 9 \\
        --halving 3 -- basic_cnn ddp 2 16 9 --data digits
    python scripts/sweep.py rates --hostfile hostfile.txt --vary seed=0,1,2,3 -- mobilenet ddp 2 16 12

    The arguments of scripts/launch_distributed.sh follow --. To continue a stopped sweep, repeat its command line. Exit
    code: 0 if every trial is done, 1 if some failed, 2 for a mistake in the arguments, 130 or 143 if stopped.
    """

    name: str = word("NAME", "Name of the sweep; its runs are NAME-1, NAME-2, ...")
    vary: tuple[str, ...] | None = text(
        "A flag and its values: V1,V2 (V1|V2 if values contain commas), LOW..HIGH, or LOW..HIGH:log.",
        default=None,
        action="append",
        metavar="FLAG=VALUES",
    )
    trials: int = number(0, 0, 1000, "Number of combinations to draw; 0: all combinations.")
    halving: int = number(0, 0, 10, "After each rung of epochs, keep one trial in N (2 or more); 0: keep all trials.")
    jobs: int = number(1, 1, 64, "Number of trials to train at the same time, each on its own GPUs or cores.")
    hostfile: str = text(
        "File that lists, as 'name slots=N', the machines to train on over ssh instead of this one; each machine "
        "trains as many trials in parallel as its slots allow.",
        metavar="FILE",
    )
    seed: int = number(0, 0, 2**31 - 1, "Seed for drawing combinations.")
    words: tuple[str, ...] = words_behind()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.halving == 1:
            raise UserError("--halving 1 would continue all trials: use 2 or more, or 0.")
        if self.hostfile and self.jobs > 1:
            raise UserError("--jobs with --hostfile: the slots set how many trials run at once: leave --jobs out.")

    @classmethod
    def read(cls, words: Sequence[str]) -> Self:
        """See `CommandSettings.read`."""
        if words and not {END_OF_FLAGS, "-h", "--help"} & {*words}:
            line = "MODEL STRATEGY GPUS BATCH_SIZE EPOCHS [FLAGS]"
            raise UserError(f"the training arguments are missing: add {END_OF_FLAGS} {line}.")
        return super().read(words)
