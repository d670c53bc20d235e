"""The configuration of a run: one frozen dataclass that declares the command line, `--help` and the YAML file.

This module does not import torch, so that `--help` and a launcher's check of the arguments take only a fraction of a
second.
"""

from __future__ import annotations

import dataclasses

from zerovision.training.base.run_folder import REPO_ROOT
from zerovision.training.base.settings import Mode
from zerovision.training.engines.settings import WAYS
from zerovision.training.observe.settings import ObserveSettings
from zerovision.training.tasks.settings import TASKS

__all__ = ["CHANGEABLE_ON_RESUME", "FIELDS", "FLAG_OF", "MODES", "REPO_ROOT", "WORDS", "TrainConfig"]


@dataclasses.dataclass(frozen=True)
class TrainConfig(ObserveSettings):
    """All settings of a run.

    The flag `--batch-size` sets the field `batch_size`. Some fields are parts of another flag's word; see `WORDS`.
    """


MODES: tuple[type[Mode], ...] = (*TASKS, *WAYS)

# What a resumed run may change; everything else is part of the recipe and must match the checkpoint. Accumulation
# follows from the global batch, the data set is identified by its fingerprint, and the starting weights are not used.
CHANGEABLE_ON_RESUME = frozenset(
    {
        *("strategy", "precision", "offload", "engine", "replicate_across", "compile", "threads_per_rank"),
        *(name for mode in MODES for name in mode.resumable),
        *("activation_checkpointing", "deterministic", "features"),
        *("batch_size", "global_batch", "gradient_accumulation_steps"),
        *("pretrained", "weights", "early_stopping_patience", "epochs"),
        *("data", "data_root", "path_column", "label_column", "label_separator", "download"),
        *("workers", "cache", "cache_gb", "remote_cache_gb", "bad_images", "max_megapixels"),
        "plugin",  # the identity of the files must match instead
        *("preset", "run_name", "log_dir", "log_every_steps", "log_hashes", "audit", "progress"),
        *("loggers", "tensorboard", "report", "profile"),
        *("resume", "save_every_steps", "save_every_minutes", "keep_last", "max_bad_steps", "on_oom", "hang_timeout"),
    }
)
FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
WORDS: dict[str, list[str]] = {}  # for each field with its own flag: that field, and the other parts of the word
for _name, _field in FIELDS.items():
    WORDS.setdefault(_field.metadata["part_of"][0] or _name, []).append(_name)


def part_name(name: str) -> str:
    """Return the name of a part of a flag's word in help and messages: `cache_gb` is --cache GB."""
    whole, first = FIELDS[name].metadata["part_of"]
    for start in (whole, first, whole.partition("_")[0]):
        name = name.removeprefix(f"{start}_")
    return name.upper()


# Each field's name in messages.
FLAG_OF = {
    name: "--" + whole.replace("_", "-") + f" {part_name(name)}" * (name != whole)
    for whole, names in WORDS.items()
    for name in names
}
