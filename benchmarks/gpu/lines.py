"""What the parts of `run.py` write: one JSON object per line, in the file at once; the tables are made of them."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import results_folder

LINES = "lines.jsonl"


def emit(kind: str, **fields: Any) -> None:
    """Append a line to `lines.jsonl` in the folder of the results, and print it."""
    line = json.dumps({"kind": kind, **fields})
    with (results_folder() / LINES).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line, flush=True)


def attempt(what: str, action: Callable[[], None], deadline: float) -> None:
    """Do one thing of several, if there is time; whatever happens, the others are still done.

    Args:
        what: in words, for the line that says that it failed or was left out.
        action: emits its own lines.
        deadline: of `time.monotonic()`, after which nothing begins.
    """
    if time.monotonic() > deadline:
        emit("left_out", what=what)
        return
    start = time.monotonic()
    try:
        action()
    except Exception as error:  # time on a GPU is dear
        traceback.print_exc()
        emit("failed", what=what, error=f"{type(error).__name__}: {str(error)[:300]}")
    print(f"{what}: {time.monotonic() - start:.1f} s", flush=True)


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return the lines of a file, without a last one that was cut off."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
