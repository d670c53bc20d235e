"""The loggers of a run: console, text log, JSON lines, TensorBoard and trackers.

To add a logger, write a subclass of `RunLogger` and a line in `LOGGERS`. Only rank 0 has loggers.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from zerovision.training.base.files import write_json
from zerovision.training.base.points import Loggers, RunLogger, warn_cannot_write
from zerovision.training.base.run_folder import CONFIG, ENVIRONMENT, RunFolder
from zerovision.training.observe.settings import TRACKERS, ObserveSettings


def _tensorboard(*of_run: Any) -> RunLogger:
    from zerovision.training.observe.loggers.tensorboard import TensorBoardLogger

    return TensorBoardLogger(*of_run)


def _tracker(name: str, *of_run: Any) -> RunLogger:
    from zerovision.training.observe.loggers.tracker import TrackerLogger

    folder, settings, _, first_step = of_run
    return TrackerLogger(name, folder, settings, first_step)


# The name in `--loggers` -> a function that creates the logger from the run's folder, its settings by name, and the
# arguments `facts` and `first_step` of `open_loggers`.
LOGGERS: dict[str, Callable[[RunFolder, dict[str, Any], dict[str, Any], int], RunLogger]] = {
    "tensorboard": _tensorboard,
    **{name: partial(_tracker, name) for name in TRACKERS},
}


def open_loggers(
    settings: ObserveSettings, folder: RunFolder, facts: dict[str, Any], more: dict[str, Any], first_step: int
) -> Loggers:
    """Create rank 0's loggers, and write the files that describe the run.

    Args:
        settings: the run's complete configuration.
        folder: the run's folder.
        facts: the result of `zerovision.training.observe.environment.describe_run`.
        more: contents of additional files that describe the run, by file name.
        first_step: the run's first step, 0 unless the run resumes; anything logged earlier for later steps is void.
    """
    from zerovision.training.observe.loggers.text import ConsoleLogger, JsonLinesLogger, TextLogger

    destinations: list[RunLogger] = [TextLogger(folder), JsonLinesLogger(folder), ConsoleLogger(settings.progress)]
    asked = [name for name in LOGGERS if name in settings.destinations]
    missing = [name for name in TRACKERS if name in asked and importlib.util.find_spec(name) is None]
    for name in (name for name in asked if name not in missing):
        try:
            destinations.append(LOGGERS[name](folder, dataclasses.asdict(settings), facts, first_step))
        except OSError as error:
            warn_cannot_write(name, error)
    loggers = Loggers(destinations)
    for name in missing:
        loggers.message(f"note: --loggers {name}: not installed; the run continues without it: pip install {name}")
    try:
        write_json(folder.path / CONFIG, dataclasses.asdict(settings))
        write_json(folder.path / ENVIRONMENT, facts)
        for name, content in more.items():
            write_json(folder.path / name, content)
    except OSError as error:
        loggers.message(f"note: the run's description cannot be written: {error}")
    return loggers
