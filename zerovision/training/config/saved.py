"""The settings of a resumed run: the settings that the run saved, unless new values are given."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerovision.models import HUB_PREFIX, hub_name_of
from zerovision.training.base.errors import UserError
from zerovision.training.base.plugins import names_of, require_plugins
from zerovision.training.base.run_folder import CONFIG
from zerovision.training.config import FIELDS, TrainConfig
from zerovision.training.config.values import is_allowed
from zerovision.training.engines.settings import LEFT_OPEN
from zerovision.training.observe.new_run import run_folder

# Settings of a single start, which have their defaults unless they are given.
OF_ONE_START = frozenset(
    {"resume", "run_name", "log_dir", "preset", "progress", "profile", "audit", "log_hashes", "deterministic"}
)
# What `--minutes` changes: the number of epochs, and the settings that are counted in epochs.
IN_EPOCHS = frozenset({"epochs", "warmup_epochs", "cooldown_epochs", "schedule", "head_epochs"})
IN_EPOCHS |= {"mixup_off_epochs", "progressive_size"}
PLUGIN = "plugin"  # a plug-in is code: the user must name it; a run's folder is not trusted to name it
OF_THE_BEGINNING = ("weights", "pretrained")  # starting weights, which a resumed run does not load


def saved_and_given(given: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the resumed run, or of a preset for a new run, overridden by the given settings.

    A run saves the value that "auto" was resolved to, and a later "auto" means this value. However, `--batch-size auto`
    is limited to sizes that the ranks of this start can share. If the resumed run was made with plug-ins that are not
    loaded, raise a UserError.
    """
    saved = saved_settings(given)
    if needed := names_of(saved.pop(PLUGIN, "")):
        require_plugins("this run", needed)
    if not saved:
        return {**preset, **given}
    model = str(given.get("model_type", "")).partition("@")[0]
    is_of_hub = model.startswith(HUB_PREFIX) and hub_name_of(saved.get("weights", "")).partition("@")[0] == model
    left = {*OF_THE_BEGINNING, *(["model_type"] if is_of_hub else [])}
    left |= {"minutes", *IN_EPOCHS} if given.get("minutes") else set()  # the run has already set them
    left |= {name for name in saved if given.get(name) in ("auto", LEFT_OPEN.get(name, "auto"))} - {"batch_size"}
    chosen = {name: value for name, value in given.items() if name not in left}
    if chosen.get("activation_checkpointing"):
        saved.pop("compile", None)  # they exclude each other
    if chosen.get("batch_size") == "auto":
        saved.pop("gradient_accumulation_steps", None)
    return saved | chosen


def with_saved_settings(config: TrainConfig, *, is_restart: bool) -> TrainConfig:
    """Return the configuration with the resumed run's values in place of those that let the run choose.

    Args:
        config: the configuration as given.
        is_restart: whether the launcher restarted this run, whose own checkpoints then take precedence over `resume`.
    """
    goes_on = is_restart and config.run_name and run_folder(config).has_checkpoint
    given = vars(config) | ({"resume": "auto"} if goes_on else {})
    return TrainConfig(**saved_and_given(given, {}) | {"resume": config.resume})


def saved_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings saved in the resumed run's folder, or {} if no run is resumed."""
    place = TrainConfig(**{name: given[name] for name in ("run_name", "log_dir", "resume") if name in given})
    if place.resume == "never":
        return {}
    with contextlib.suppress(UserError, OSError, ValueError, RuntimeError, AttributeError):
        folder, path = run_folder(place), Path(place.resume).expanduser()
        if place.resume in ("auto", "must"):
            folders = [folder.path] if place.run_name and folder.has_checkpoint else []
        else:  # a run, its folder of checkpoints, or a checkpoint
            folders = [path, path.parent, path.parent.parent]
        for file in (folder / CONFIG for folder in folders):
            if file.is_file():
                content = json.loads(file.read_text(encoding="utf-8"))
                names = FIELDS.keys() & content.keys() - OF_ONE_START
                return {name: content[name] for name in names if is_allowed(content[name], FIELDS[name])}
    return {}
