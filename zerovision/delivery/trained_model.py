"""Finds the trained model that a user specifies by a run's name, a run's folder, or a safetensors file."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerovision.training.base.errors import UserError, nearest
from zerovision.training.base.plugins import loaded, names_of, require_plugins
from zerovision.training.base.run_folder import CONFIG, WEIGHTS, log_folder
from zerovision.training.config import TrainConfig
from zerovision.training.config.file import read_values

PICKLE_STARTS = (b"PK\x03\x04", b"\x80")  # torch.save's archive since PyTorch 1.6, and its older format


@dataclass(frozen=True)
class TrainedModel:
    """A trained model on disk."""

    weights: Path  # the model's safetensors file
    run: Path | None  # folder of the run that trained the model; None for a file outside a run's folder

    def config(self) -> TrainConfig | None:
        """Return the run's configuration; None if the run is unknown.

        Raises:
            UserError: if config.json is damaged.
        """
        return None if self.run is None else read_run_config(self.run)


def find_model(given: str | Path) -> TrainedModel:
    """Return the model that an argument names.

    Args:
        given: a safetensors file, a run's folder or a published model's folder (relative to the current folder or to
            the repository's), or the name of a run in logs/runs.

    Raises:
        UserError: if there is no such model, or if loading the file could run code.
    """
    path = Path(os.path.expanduser(given))
    path = path if os.path.exists(path) else log_folder().parent / path  # 'logs/runs/NAME/...' in another folder
    if os.path.isfile(path):
        _check_is_safetensors(path)
        return TrainedModel(path, path.parent if _is_run(path.parent) else None)
    if given and os.path.isfile(path / WEIGHTS) and not _is_run(path):
        return TrainedModel(path / WEIGHTS, None)  # as it was published
    run = find_run(given)
    weights = run / WEIGHTS
    if not os.path.isfile(weights):
        raise UserError(f"run '{run}' has no {WEIGHTS} yet: it is written after the first epoch.")
    return TrainedModel(weights, run)


def find_run(given: str | Path) -> Path:
    """Return the folder of the run that an argument names: a folder, a name in logs/runs, or 'logs/runs/NAME'.

    Raises:
        UserError: if there is no such run.
    """
    runs = log_folder() / "runs"
    path = Path(os.path.expanduser(given))
    places = (path, runs / given, log_folder().parent / path) if given else ()
    folders = [folder for folder in places if os.path.isdir(folder)]
    if found := next(filter(_is_run, folders), None):  # a run is named after its data, so the data's folder may match
        return found.resolve()
    if folders:
        raise UserError(f"folder '{folders[0]}' is not a run: it has no run's config.json. Use a run: logs/runs/NAME.")
    newest = sorted(filter(_is_run, runs.iterdir()), key=os.path.getmtime, reverse=True) if runs.is_dir() else []
    names = [folder.name for folder in newest]
    raise UserError(
        f"'{given}' is neither a file, nor a folder, nor a run in {runs}.{nearest(str(given), names)} "
        f"{'Newest runs: ' + ', '.join(names[:8]) + '.' if names else 'There are no runs yet.'}"
    )


def read_run_config(run: Path) -> TrainConfig:
    """Return the configuration of a run; settings that were added in newer versions have their default values.

    The configuration is returned even if this version would refuse to train with it.

    Raises:
        UserError: if config.json is missing or damaged, or names plug-ins that are not loaded.
    """
    path = run / CONFIG
    config = TrainConfig(**read_values(read_json(path), f"'{path}'"))
    require_plugins(f"run '{run.name}'", names_of(config.plugin))
    return dataclasses.replace(config, plugin=loaded())


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a run's file.

    Raises:
        UserError: if the file is missing or damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"'{path}' is damaged: {error}. Restore it, or remove it.") from None
    if not isinstance(content, dict):
        raise UserError(f"'{path}' is damaged: it is not a JSON object. Restore it, or remove it.")
    return content


def _is_run(folder: Path) -> bool:
    """Return whether a folder has a run's config.json, damaged or not, rather than timm's of a published model."""
    try:
        return "architecture" not in read_json(folder / CONFIG)
    except UserError:
        return os.path.isfile(folder / CONFIG)


def _check_is_safetensors(path: Path) -> None:
    if path.suffix in (".onnx", ".pt2"):
        raise UserError(f"'{path}' is an export for other programs: use its run, or the weights it was made from.")
    try:
        with path.open("rb") as stream:
            start = stream.read(9)
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}.") from None
    if start.startswith(PICKLE_STARTS) and start[8:] != b"{":
        raise UserError(f"'{path}' is a pickle, which could run code when it is loaded: use a run, or its {WEIGHTS}.")
    if start[8:] != b"{":
        raise UserError(f"'{path}' is not a safetensors file: use a run, or its {WEIGHTS}.")
