"""Prints the lines of product code per room, and the budget that each was given: `make size`.

A line is what `wc -l` counts, in the Python and shell files that git tracks; code are those that are neither blank nor
a comment, docstring or import. A budget is what a room shall come down to, not what it has: whoever adds lines takes
them from somewhere else, or says in the commit what they buy.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = {
    "scripts": 350,
    "zerovision/launch": 2700,
    "models": 1500,
    "zerovision/training/base": 1200,
    "zerovision/training/world": 800,
    "zerovision/training/data": 3200,
    "zerovision/training/recipe": 1500,
    "zerovision/training/engines": 2300,
    "zerovision/training/checkpoint": 1500,
    "zerovision/training/observe": 2300,
    "zerovision/training": 1100,
    "zerovision/planning": 1600,
    "zerovision/delivery": 2950,
    "zerovision/extras": 1300,
}
ELSEWHERE = {
    "zerovision/commands": "scripts",
    "zerovision/training/config": "zerovision/training/base",
    "zerovision/training/steps": "zerovision/training",
}  # whose budget such a room shares
SINCE = 5100  # in any room: meshes, contrastive training, islands; sources, audits of data; trackers, sweeps, reasons


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
    """Return files, lines and code of every room of `BUDGET`; a file counts for the innermost one that contains it."""
    listing = subprocess.run(["git", "ls-files", "*.py", "*.sh"], cwd=ROOT, capture_output=True, text=True, check=True)
    rooms = dict.fromkeys(BUDGET, (0, 0, 0))
    for name in listing.stdout.splitlines():
        innermost = max((room for room in {*BUDGET, *ELSEWHERE} if name.startswith(room + "/")), key=len, default=None)
        if innermost is not None and (ROOT / name).is_file():
            files, lines, code = rooms[room := ELSEWHERE.get(innermost, innermost)]
            rooms[room] = (files + 1, lines + (ROOT / name).read_bytes().count(b"\n"), code + code_lines(ROOT / name))
    return rooms


def main() -> None:
    """Print one line per room and the sum."""
    rooms = sizes()
    width = max(map(len, rooms))
    print(f"{'room':{width}}  files  lines   code  budget")
    for room, (files, lines, code) in rooms.items():
        print(f"{room:{width}}  {files:5}  {lines:5}  {code:5}  {BUDGET[room]:6}")
    files, lines, code = (sum(column) for column in zip(*rooms.values(), strict=True))
    budget = sum(BUDGET.values())
    print(f"{'all':{width}}  {files:5}  {lines:5}  {code:5}  {budget:6} + {SINCE} for what came later")


if __name__ == "__main__":
    main()
