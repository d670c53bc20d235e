"""Trains image classifiers from one laptop core to many GPUs with one line."""

from __future__ import annotations

import pkgutil
from typing import Any

__version__ = "0.1.0"
_PLACES = {  # of what `import zerovision` offers, imported when it is used
    "TrainConfig": "zerovision.training.config:TrainConfig",
    "UserError": "zerovision.training.base.errors:UserError",
    "evaluate": "zerovision.delivery.evaluate:evaluate",
    "load_model": "zerovision.training.checkpoint.weights:load_model",
    "predict": "zerovision.delivery.predict:predict",
    "preprocess": "zerovision.training.checkpoint.weights:preprocess",
}
__all__ = ["TrainConfig", "UserError", "evaluate", "load_model", "predict", "preprocess"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'zerovision' has no attribute {name!r}")
    return pkgutil.resolve_name(_PLACES[name])
