"""How cost grows: with the ranks, the batch, the image size, and the number of files of a data set.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --only files --files-up-to 1000000

Images/s are those of training steps on batches in memory; the files are empty ones in a tree that is made for the
purpose and removed again. Draws `docs/images/scaling.png`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launch import torchrun
from benchmarks.report import Section, save, show, versions

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "scaling.png"
CLASSES = 10
RANKS, RANK_ROUNDS = (1, 2, 4), 2
BATCHES, IMAGE_SIZES = (4, 8, 16, 32, 64), (32, 64, 96, 128, 224)
FILE_COUNTS = (1_000, 10_000, 100_000, 1_000_000)

Case = tuple[int, int]
"""Images per rank, and their size in pixels."""


def scan_cost(count: int) -> dict[str, float]:
    """Make a tree of `count` files, load it as a data set in a process of its own, and remove it.

    Returns:
        `seconds` of loading, `index` bytes that stay, `peak` bytes above the start while loading.
    """
    folder = Path(tempfile.mkdtemp(prefix="zerovision-files-"))
    try:
        for label in range(CLASSES):
            (folder / f"class{label}").mkdir()
        for number in range(count):
            (folder / f"class{number % CLASSES}" / f"image_{number:08d}.jpg").touch()
        command = [sys.executable, str(ROOT / "benchmarks" / "scaling_files.py"), str(folder)]
        result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        return json.loads(result.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(folder)


def images_per_second(ranks: int, cases: Sequence[Case], model: str) -> dict[Case, float]:
    """Time training steps under ddp, all cases in one job; return images per second over all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.json"
        torchrun(
            ranks,
            "benchmarks.scaling_rank",
            f"--model-type={model}",
            f"--cases={json.dumps(cases)}",
            f"--result={result}",
        )
        seconds = json.loads(result.read_text())
    return {case: ranks * case[0] / took for case, took in zip(cases, seconds, strict=True)}


def rate_sections(model: str) -> list[Section]:
    """Measure images/s for more ranks, larger batches and larger images."""
    batches, sizes = [(batch, 64) for batch in BATCHES], [(16, size) for size in IMAGE_SIZES]
    by_ranks: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    for number in range(RANK_ROUNDS):
        for ranks in RANKS[:: 1 - 2 * (number % 2)]:  # there and back again
            by_ranks[ranks].append(images_per_second(ranks, [(16, 64)], model)[16, 64])
            print(f"{ranks} ranks: {by_ranks[ranks][-1]:.0f} images/s", flush=True)
    by_case = images_per_second(2, list(dict.fromkeys([*batches, *sizes])), model)
    print(*(f"{batch} images of {size} pixels: {rate:.0f}/s" for (batch, size), rate in by_case.items()), sep="\n")
    text = f"{model}, ddp, fp32, 1 thread per rank, steps from memory; medians."
    tables = {
        ("Ranks", "ranks"): {ranks: statistics.median(rates) for ranks, rates in by_ranks.items()},
        ("Batch size", "images a rank"): {batch: by_case[batch, size] for batch, size in batches},
        ("Image size", "pixels"): {size: by_case[batch, size] for batch, size in sizes},
    }
    return [
        Section(title, text, (unit, "images/s"), [(str(value), f"{rate:.0f}") for value, rate in rates.items()])
        for (title, unit), rates in tables.items()
    ]


def files_section(counts: list[int]) -> Section:
    """Measure what the list of files costs."""
    rows = []
    for count in counts:
        cost = scan_cost(count)
        per_file = (f"{1e6 * cost['seconds'] / count:.1f}", f"{cost['index'] / count:.0f}")
        rows.append((str(count), f"{cost['seconds']:.2f}", *per_file, f"{cost['peak'] / count:.0f}"))
        print("files", *rows[-1], flush=True)
    text = "Empty files in 10 class folders, names of 22 characters with their folder; split 80:20 while loading."
    columns = ("files", "seconds to load", "µs per file", "index, bytes a file", "peak while loading, bytes a file")
    return Section("Number of files", text, columns, rows)


def draw(sections: list[Section]) -> None:
    """Draw images/s, or microseconds per file, over the first column of each table."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(sections), figsize=(3.2 * len(sections), 2.8), squeeze=False)
    for axis, section in zip(axes[0], sections, strict=True):
        column = section.columns.index("µs per file" if "µs per file" in section.columns else "images/s")
        values, costs = zip(*((float(row[0]), float(row[column])) for row in section.rows), strict=True)
        axis.plot(values, costs, marker="o")
        axis.set(xscale="log", xlabel=section.columns[0], title=section.columns[column])
        axis.set_ylim(0, 1.1 * max(costs))
        axis.grid(alpha=0.3)
        if len(values) < 8 and max(values) < 10_000:
            axis.set_xticks(values, [f"{value:g}" for value in values], minor=False)
            axis.minorticks_off()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)
    print(f"written: {PICTURE}")


def main() -> None:
    """Measure, print, save, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("rates", "files"), help="measure one of the two; nothing is drawn then")
    parser.add_argument("--model-type", default="mobilenet")
    parser.add_argument("--files-up-to", type=int, default=1_000_000)
    given = parser.parse_args()
    sections = [] if given.only == "files" else rate_sections(given.model_type)
    if given.only != "rates":
        sections.append(files_section([count for count in FILE_COUNTS if count <= given.files_up_to]))
    for section in sections:
        show(section)
    save("scaling", "How cost grows", versions("torch", "deepspeed"), shlex.join(["python", *sys.argv]), sections)
    if given.only is None:
        draw(sections)


if __name__ == "__main__":
    main()
