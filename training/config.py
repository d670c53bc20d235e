"""The configuration of a run: one frozen dataclass that declares the command line, `--help` and the YAML file.

This module imports neither torch nor deepspeed, so that `--help` and a launcher's check of the arguments cost a
fraction of a second.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

from training.data.data_fields import DataFields
from training.fields import option
from training.model_fields import FEWEST_IMAGES, ModelFields
from training.parallel.parallel_fields import ParallelFields
from training.recipe.recipe_fields import RecipeFields

REPO_ROOT = Path(__file__).resolve().parents[1]


# A dataclass takes the fields of its last base first: read the bases from right to left, then what is below.
@dataclasses.dataclass(frozen=True)
class TrainConfig(DataFields, ParallelFields, RecipeFields, ModelFields):
    """All settings of a run. Field `batch_size` is the flag `--batch-size`, and so on."""

    # Output.
    run_name: str = option("", "Name of the run's folders; default: date, model, strategy.")
    log_dir: str = option("", "Folder of all logs; default: logs/ beside scripts/.")
    log_every_steps: int | Literal["auto"] = option(
        "auto", "Optimizer steps between two log points; auto: 10, or more if they take less than a second.", low=1
    )
    progress: Literal["auto", "bar", "lines", "off"] = option(
        "auto", "Console progress; auto: a bar on a terminal; off: only start, result and problems."
    )
    tensorboard: bool = option(True, "Write TensorBoard event files.")
    report: bool = option(True, "Write report.html, the whole run on one page, into the run's folder when it ends.")
    profile: int = option(
        0,
        "Steps of rank 0's first epoch that torch.profiler traces into the run's folder; 0: none.",
        low=0,
        high=10_000,
    )

    # Checkpoints, resume, and what ends a run.
    resume: str = option(
        "never", "never, auto (newest good checkpoint of --run-name, if any), must, or a checkpoint folder."
    )
    save_every_steps: int = option(0, "Optimizer steps between checkpoints within an epoch; 0: none by steps.", low=0)
    save_every_minutes: float = option(5.0, "Minutes between checkpoints within an epoch; 0: none by time.", low=0)
    keep_last: int = option(2, "Newest checkpoints to keep, beside the best epoch's.", low=1, high=100_000)
    max_bad_steps: int = option(10, "Skipped steps in a row (gradient not finite) that end the run; 0: never.", low=0)
    on_oom: Literal["stop", "adapt"] = option(
        "stop",
        "Out of memory: stop; adapt: the launcher starts again from the newest checkpoint with a smaller micro-batch "
        "(the same global batch), recomputed activations, a higher ZeRO stage, offload, whichever is the first left.",
    )
    hang_timeout: float = option(
        300.0,
        "Seconds without a finished step after which a rank counts as hung (first step and saves: 5 times).",
        above=0,
        high=10**6,
    )
    deterministic: bool = option(False, "Use PyTorch's deterministic algorithms, so that a GPU run can be repeated.")

    @property
    def micro_batch(self) -> int:
        """`batch_size` as a number; `auto` becomes one before the run is built, and is the smallest until then."""
        return FEWEST_IMAGES if isinstance(self.batch_size, str) else self.batch_size


# What a resumed run may change; everything else is part of the recipe and must match the checkpoint. Accumulation
# follows from the global batch, the data set is identified by its fingerprint, the starting weights no longer matter.
CHANGEABLE_ON_RESUME = frozenset(
    {
        *("strategy", "precision", "offload", "engine", "replicate_across", "compile", "threads_per_rank"),
        "deepspeed_config",
        *("activation_checkpointing", "deterministic"),
        *("batch_size", "global_batch", "gradient_accumulation_steps"),
        *("pretrained", "weights", "early_stopping_patience", "epochs"),
        "raw_accuracy",
        *("data", "data_root", "download", "workers", "cache", "cache_gb", "bad_images", "links"),
        *("preset", "run_name", "log_dir", "log_every_steps", "progress", "tensorboard", "report", "profile"),
        *("resume", "save_every_steps", "save_every_minutes", "keep_last", "max_bad_steps", "on_oom", "hang_timeout"),
    }
)
FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
FLAG_OF = {name: "--" + name.replace("_", "-") for name in FIELDS}


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the configuration as JSON that `--config` reads back to the same configuration."""
    path.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n", encoding="utf-8")
