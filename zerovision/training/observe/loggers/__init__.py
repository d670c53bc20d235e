"""Where a run's numbers go: console, text log, JSON lines, TensorBoard and trackers, behind one small interface.

A new logger is one subclass of `RunLogger` and one line in `open_loggers`. Only rank 0 builds any.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

from zerovision.training.base.atomic_write import write_json
from zerovision.training.base.run_folder import CONFIG, ENVIRONMENT, RunFolder
from zerovision.training.base.run_logger import Loggers, RunLogger, warn_cannot_write
from zerovision.training.observe.settings import TRACKERS, ObserveSettings


def open_loggers(
    settings: ObserveSettings, folder: RunFolder, facts: dict[str, Any], more: dict[str, Any], first_step: int
) -> Loggers:
    """Build rank 0's loggers and write the files that describe the run.

    Args:
        settings: the run's whole configuration.
        folder: where the files go.
        facts: of `zerovision.training.observe.environment.describe_run`.
        more: files that describe it, name -> content.
        first_step: the run's first step, 0 unless it resumes: steps from there on that were logged before are void.
    """
    from zerovision.training.observe.loggers.text import ConsoleLogger, JsonLinesLogger, TextLogger

    destinations: list[RunLogger] = [TextLogger(folder), JsonLinesLogger(folder), ConsoleLogger(settings.progress)]
    if "tensorboard" in settings.destinations:
        from zerovision.training.observe.loggers.tensorboard import TensorBoardLogger

        try:
            destinations.append(TensorBoardLogger(folder, dataclasses.asdict(settings), facts, first_step))
        except OSError as error:
            warn_cannot_write("TensorBoardLogger", error)
    trackers = [name for name in TRACKERS if name in settings.destinations]
    missing = [name for name in trackers if importlib.util.find_spec(name) is None]
    for name in (name for name in trackers if name not in missing):
        from zerovision.training.observe.loggers.tracker import TrackerLogger

        try:
            destinations.append(TrackerLogger(name, folder, dataclasses.asdict(settings), first_step))
        except OSError as error:
            warn_cannot_write(name, error)
    loggers = Loggers(destinations)
    for name in missing:
        loggers.message(f"note: --loggers {name}: it is not installed, the run goes on without it: pip install {name}")
    try:
        write_json(folder.path / CONFIG, dataclasses.asdict(settings))
        write_json(folder.path / ENVIRONMENT, facts)
        for name, content in more.items():
            write_json(folder.path / name, content)
    except OSError as error:
        loggers.message(f"note: the run's description cannot be written: {error}")
    return loggers
