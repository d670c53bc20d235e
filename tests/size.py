"""Prints the lines of product code per room: `make size`; fails if a room has more code than its limit.

A line is what `wc -l` counts, in the Python and shell files that git tracks; code are those that are neither blank nor
a comment, docstring or import. A limit is what a room had last, an end what it shall come down to: whoever takes code
out of a room lowers its limit in the same commit, and nobody raises one.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {  # limit and end
    "scripts": (479, 350),
    "models": (1244, 900),
    "zerovision/training/config": (786, 500),
    "zerovision/training/base": (1081, 550),
    "zerovision/training/world": (590, 450),
    "zerovision/training/data": (4144, 2900),
    "zerovision/training/recipe": (567, 650),
    "zerovision/training/engines": (2960, 2250),
    "zerovision/training/checkpoint": (579, 600),
    "zerovision/training/tasks": (774, 400),
    "zerovision/training/observe": (1149, 1050),
    "zerovision/training": (2102, 1400),
    "zerovision/launch": (2456, 1800),
    "zerovision/planning": (1181, 1000),
    "zerovision/delivery": (3111, 2400),
    "zerovision/extras": (1447, 1300),
}
ELSEWHERE = {"zerovision": "scripts", "zerovision/commands": "scripts"}  # in whose room such a folder counts


def code_lines(path: Path) -> int:
    """Return the lines of a file that are neither blank nor a comment, docstring or import."""
    text = path.read_text()
    numbers = {n for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            body = getattr(node, "body", None)
            if isinstance(node, ast.Import | ast.ImportFrom):
                numbers -= set(range(node.lineno, (node.end_lineno or 0) + 1))
            elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) and body:
                numbers -= set(range(body[0].lineno, body[0].end_lineno + 1))
    return len(numbers)


def sizes() -> dict[str, tuple[int, int, int]]:
    """Return files, lines and code of every room of `ROOMS`; a file counts for the innermost one that contains it."""
    listing = subprocess.run(["git", "ls-files", "*.py", "*.sh"], cwd=ROOT, capture_output=True, text=True, check=True)
    rooms = dict.fromkeys(ROOMS, (0, 0, 0))
    for name in listing.stdout.splitlines():
        innermost = max((room for room in {*ROOMS, *ELSEWHERE} if name.startswith(room + "/")), key=len, default=None)
        if innermost is not None and (ROOT / name).is_file():
            files, lines, code = rooms[room := ELSEWHERE.get(innermost, innermost)]
            rooms[room] = (files + 1, lines + (ROOT / name).read_bytes().count(b"\n"), code + code_lines(ROOT / name))
    return rooms


def main() -> int:
    """Print one line per room and the sum; return 1 if a room has more code than its limit."""
    rooms = sizes()
    width = max(map(len, rooms))
    print(f"{'room':{width}}  files  lines   code  limit    end")
    for room, (files, lines, code) in rooms.items():
        limit, end = ROOMS[room]
        print(
            f"{room:{width}}  {files:5}  {lines:5}  {code:5}  {limit:5}  {end:5}{'  too much' if code > limit else ''}"
        )
    files, lines, code = (sum(column) for column in zip(*rooms.values(), strict=True))
    limit, end = (sum(column) for column in zip(*ROOMS.values(), strict=True))
    print(f"{'all':{width}}  {files:5}  {lines:5}  {code:5}  {limit:5}  {end:5}")
    return int(any(code > ROOMS[room][0] for room, (_, _, code) in rooms.items()))


if __name__ == "__main__":
    sys.exit(main())
