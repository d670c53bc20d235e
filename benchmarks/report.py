"""What the benchmarks share when they tell: the machine, ratios over rounds, and tables on the screen and on file."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from zerovision.training.base.control_groups import usable_cores

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Section:
    """One table: its title, a sentence or two on how it was measured, its columns and rows."""

    title: str
    text: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def hardware() -> str:
    """Name the hardware in a word for a file's name: `2cpu`, or the GPU."""
    if torch.cuda.is_available():
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return f"{usable_cores()}cpu"


def machine_name() -> str:
    """Return cores and processor of this machine, as Linux calls it.

    A hypervisor may hide the processor's name, so its family and model are named too.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = said.get("model name", platform.machine())
    family = f" (family {said['cpu family']}, model {said['model']})" if {"cpu family", "model"} <= said.keys() else ""
    return f"{usable_cores()} cores of {name}{family}"


def versions(*packages: str) -> str:
    """Say which versions are installed, Python first; packages that are missing are left out."""
    found = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def today() -> str:
    """Return the date as in the result files' names."""
    return datetime.date.today().isoformat()


def ratios_to(baseline: str, rounds: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return each contestant's value over the baseline's of the same round."""
    return {name: [values[name] / values[baseline] for values in rounds] for name in rounds[0]}


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Write median and quartiles; only the values themselves where there are fewer than three."""
    median = f"{statistics.median(values):.{digits}f}"
    if len(values) < 2:
        return median
    if len(values) == 2:
        low, high = min(values), max(values)
    else:
        low, _, high = statistics.quantiles(values, n=4)
    return f"{median} ({low:.{digits}f}-{high:.{digits}f})"


def show(section: Section) -> None:
    """Print a table on the screen."""
    console = Console()
    console.print(f"[bold]{section.title}[/bold]\n{section.text}", highlight=False)
    table = Table(*section.columns)
    for row in section.rows:
        table.add_row(*row)
    console.print(table)


def results_folder() -> Path:
    """Return the folder that the variable OUT names, else `results`; it is made if need be."""
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save(name: str, title: str, facts: str, command: str, sections: Sequence[Section]) -> Path:
    """Write the tables as Markdown to `results/<name>_<hardware>_<date>.md`, and say where."""
    blocks = [f"# {title}, {hardware()}, {today()}", facts, f"```bash\n{command}\n```"]
    for section in sections:
        head = f"| {' | '.join(section.columns)} |\n|{'---|' * len(section.columns)}"
        rows = "\n".join(f"| {' | '.join(row)} |" for row in section.rows)
        blocks += [f"## {section.title}", section.text, f"{head}\n{rows}"]
    path = results_folder() / f"{name}_{hardware()}_{today()}.md"
    path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    print(f"written: {path}")
    return path
