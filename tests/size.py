"""Prints the lines of product code per room against a budget: `make size`.

A line is what `wc -l` counts, in the Python and shell files that git tracks. Raise a number here together with the
change that needs it, and say in its commit what the lines buy.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = {
    "scripts": 1031,
    "launch": 3858,
    "models": 2501,
    "training": 3083,
    "training/base": 1709,
    "training/world": 1401,
    "training/data": 7514,
    "training/recipe": 1462,
    "training/engines": 5296,
    "training/checkpoint": 1504,
    "training/observe": 2620,
    "training/steps": 1131,
    "training/config": 1162,
    "planning": 3328,
    "delivery": 4508,
    "delivery/export": 1229,
    "delivery/report": 1660,
}


def lines_per_room() -> dict[str, tuple[int, int]]:
    """Return files and lines of every room of `BUDGET`; a file counts for the innermost one that contains it."""
    listing = subprocess.run(["git", "ls-files", "*.py", "*.sh"], cwd=ROOT, capture_output=True, text=True, check=True)
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for name in listing.stdout.splitlines():
        room = max((room for room in BUDGET if name.startswith(room + "/")), key=len, default=None)
        if room is not None and (ROOT / name).is_file():
            files[room] += 1
            lines[room] += (ROOT / name).read_bytes().count(b"\n")
    return {room: (files[room], lines[room]) for room in BUDGET}


def main() -> None:
    """Print one line per room and the sum."""
    rooms = lines_per_room()
    width = max(map(len, rooms))
    print(f"{'room':{width}}  files  lines  budget")
    for room, (files, lines) in rooms.items():
        mark = "  over" if lines > BUDGET[room] else ""
        print(f"{room:{width}}  {files:5}  {lines:5}  {BUDGET[room]:6}{mark}")
    files, lines = (sum(column) for column in zip(*rooms.values(), strict=True))
    print(f"{'all':{width}}  {files:5}  {lines:5}  {sum(BUDGET.values()):6}")


if __name__ == "__main__":
    main()
