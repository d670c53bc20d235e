"""Part 3 of `run.py`: whole trainings from JPEG files.

python -m benchmarks.gpu.files --seconds 100
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.gpu.lines import attempt, emit
from benchmarks.gpu.options import Options, part_options
from benchmarks.jpegs import make_folder
from benchmarks.launch import run
from zerovision.training.base.control_groups import usable_cores

IMAGES, COPIES, PIXELS, BATCH_SIZE = 1000, 12, 384, 128  # one core takes 8 ms to make an image
CASES = (("mobilenet", "ram", 3), ("mobilenet", "off", 2), ("timm:resnet50", "ram", 2))  # model, cache, epochs
WORKERS = 15


def copied_folder(folder: Path, images: int, copies: int, pixels: int) -> Path:
    """Make so many JPEG files, each so often, and return their folder."""
    made = make_folder(folder, images, pixels)
    for file in list(made.glob("train/*/*.jpg")):
        for copy in range(1, copies):
            shutil.copy(file, file.with_stem(f"{file.stem}-{copy}"))
    return made


def train(case: tuple[str, str, int], options: Options, jpegs: Path, seconds: float) -> None:
    """Emit rates, waits, evaluation, stalls of saving, and memory of a training."""
    model, cache, epochs = case
    workers = min(WORKERS, usable_cores())
    size, batch_size = (64, 4) if options.is_quick else (224, BATCH_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "scripts/train_distributed.py", "--model-type", model, "--data", str(jpegs)]
        command += ["--image-size", str(size), "--batch-size", str(batch_size), "--epochs", str(epochs)]
        command += ["--cache", cache, "--workers", str(workers), "--progress", "off", "--tensorboard", "false"]
        command += ["--report", "false", "--log-dir", folder, "--run-name", "jpegs"]
        run(command, timeout_s=max(seconds, 1))
        of_run = Path(folder, "runs", "jpegs")
        entries = [json.loads(line) for line in (of_run / "metrics.jsonl").read_text().splitlines()]
    of_kind = {kind: [entry for entry in entries if entry["kind"] == kind] for kind in ("epoch", "checkpoint", "end")}
    end, last = of_kind["end"][-1], of_kind["epoch"][-1]
    emit(
        "training",
        model=model,
        workers=workers,
        cache=cache,
        batch_size=batch_size,
        images_per_s=[entry["images_per_second"] for entry in of_kind["epoch"]],
        data_wait_share=last["data_wait_share"],
        evaluation_seconds=end["evaluation_seconds"],
        save_stall_seconds=[entry["stall_seconds"] for entry in of_kind["checkpoint"]],
        time_shares=end["time_shares"],
        memory_bytes=end["memory_bytes"],
    )


def main() -> None:
    """Train in what is left of the time."""
    options = part_options(__doc__)
    images, copies, pixels = (40, 1, 64) if options.is_quick else (IMAGES, COPIES, PIXELS)
    cases = [(model, "ram", 2) for model in options.models or ("mobilenet",)] if options.is_quick else CASES
    with tempfile.TemporaryDirectory() as folder:
        jpegs = copied_folder(Path(folder), images, copies, pixels)
        for case in cases:
            seconds = options.deadline - time.monotonic()
            what = f"JPEGs, {case[0]}, --cache {case[1]}"
            attempt(what, partial(train, case, options, jpegs, seconds), options.deadline)


if __name__ == "__main__":
    main()
