"""For all tests."""

from __future__ import annotations

import atexit
import gc
import sys

import pytest

gc.disable()  # while all is imported, of which nothing is garbage: a tenth of the time


def pytest_collection_finish() -> None:
    """Spare the collector what has been imported, half a million objects, and let it come less often.

    It would take a tenth of the time: tests leave little garbage.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    atexit.register(gc.unfreeze)  # else some libraries report what they leave


@pytest.fixture
def no_plugins_stay():
    """Take out again what a test's own files have added to the tables of this process, which later tests share."""
    import zerovision
    from zerovision.training.base import plugins

    names = ("MODELS", "DATASETS", "AUGMENTATIONS", "SCHEDULES", "LOGGERS", "LOSSES", "FORMATS", "ELEMENT_WISE")
    tables = [getattr(zerovision, name) for name in names]
    before = [table.copy() for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        (table.extend if isinstance(table, list) else table.update)(content)
    for name in plugins._LOADED:
        del sys.modules[name]
    plugins._LOADED.clear()
