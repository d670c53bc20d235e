"""Trains image classifiers with one command, on anything from a laptop core to many GPUs."""

from __future__ import annotations

import pkgutil
from typing import Any

__version__ = "1.0.0"
_PLACES = {  # the module of each public name, imported when the name is first used
    "AUGMENTATIONS": "training.data.augmentations",
    "Augmentation": "training.data.augmentations",
    "Batch": "training.data.reader",
    "DATASETS": "training.data.settings",
    "DatasetEntry": "training.data.settings",
    "ELEMENT_WISE": "training.recipe.rules",
    "EpochPoint": "training.base.points",
    "ExportFormat": "delivery.export",
    "FORMATS": "delivery.export",
    "LOGGERS": "training.observe.loggers",
    "LOSSES": "training.tasks.settings",
    "MODELS": "models",
    "ModelSpec": "models",
    "RunFolder": "training.base.run_folder",
    "RunLogger": "training.base.points",
    "SCHEDULES": "training.recipe.schedule",
    "TrainConfig": "training.config",
    "UserError": "training.base.errors",
    "WHOLE_PARAMETER": "training.recipe.rules",
    "evaluate": "commands.from_python",
    "load_model": "training.checkpoint.weights",
    "load_plugins": "training.base.plugins",
    "predict": "commands.from_python",
    "preprocess": "training.checkpoint.weights",
    "train": "commands.from_python",
}
__all__ = [*_PLACES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'zerovision' has no attribute {name!r}")
    return pkgutil.resolve_name(f"zerovision.{_PLACES[name]}:{name}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
