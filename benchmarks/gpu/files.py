"""Part 3 of `run.py`: whole trainings from JPEG files, their memory beside its prediction, then the GPU's tests.

python -m benchmarks.gpu.files --seconds 150
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.gpu.lines import attempt, emit
from benchmarks.gpu.options import ROOT, Options, part_options
from benchmarks.jpegs import make_folder
from benchmarks.report import results_folder
from training.base.control_groups import usable_cores

IMAGES, COPIES, PIXELS, BATCH_SIZE = 1000, 12, 384, 128  # one core takes 8 ms to make an image
CASES = (("mobilenet", 8), ("mobilenet", 15), ("timm:resnet50", 15))  # model, workers


def copied_folder(folder: Path, images: int, copies: int, pixels: int) -> Path:
    """Make so many JPEG files, each so often, and return their folder."""
    made = make_folder(folder, images, pixels)
    for file in list(made.glob("train/*/*.jpg")):
        for copy in range(1, copies):
            shutil.copy(file, file.with_stem(f"{file.stem}-{copy}"))
    return made


def train(model: str, workers: int, options: Options, jpegs: Path, seconds: float) -> None:
    """Emit rates, waits, evaluation, stalls of saving, and memory of a training of two epochs."""
    size, batch_size = (64, 4) if options.is_quick else (224, BATCH_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "scripts/train_distributed.py", "--model-type", model, "--data", str(jpegs)]
        command += ["--image-size", str(size), "--batch-size", str(batch_size), "--epochs", "2", "--cache", "off"]
        command += ["--workers", str(min(workers, usable_cores())), "--progress", "off", "--tensorboard", "false"]
        command += ["--report", "false", "--log-dir", folder, "--run-name", "jpegs"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=max(seconds, 1), stdout=subprocess.DEVNULL)
        run = Path(folder, "runs", "jpegs")
        entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        predicted = json.loads((run / "prediction.json").read_text())["memory_bytes"]
    of_kind = {kind: [entry for entry in entries if entry["kind"] == kind] for kind in ("epoch", "checkpoint", "end")}
    end, last = of_kind["end"][-1], of_kind["epoch"][-1]
    emit(
        "training",
        model=model,
        workers=min(workers, usable_cores()),
        batch_size=batch_size,
        images_per_s=[entry["images_per_second"] for entry in of_kind["epoch"]],
        data_wait_share=last["data_wait_share"],
        evaluation_seconds=end["evaluation_seconds"],
        save_stall_seconds=[entry["stall_seconds"] for entry in of_kind["checkpoint"]],
        time_shares=end["time_shares"],
        memory_bytes=end["memory_bytes"],
        predicted_memory_bytes=predicted["peak"],  # of tensors, as the allocator counts
    )


def run_tests(deadline: float) -> None:
    """Run the small tests marked `gpu` until the deadline, and emit how they ended."""
    log, files = results_folder() / "gpu_tests.log", ("tests/gpu/test_gpu_engines.py",)
    command = [sys.executable, "-u", "-m", "pytest", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider", *files]
    with log.open("w") as output:
        try:
            seconds = max(deadline - time.monotonic(), 1)
            code = subprocess.run(
                command, cwd=ROOT, timeout=seconds, stdout=output, stderr=output, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    lines = log.read_text().splitlines() or [""]
    emit("tests", exit_code=code, last_line=lines[-1])


def main() -> None:
    """Train, then test in what is left of the time."""
    options = part_options(__doc__)
    images, copies, pixels = (40, 1, 64) if options.is_quick else (IMAGES, COPIES, PIXELS)
    cases = [(model, 2) for model in options.models or ("mobilenet",)] if options.is_quick else CASES
    with tempfile.TemporaryDirectory() as folder:
        jpegs = copied_folder(Path(folder), images, copies, pixels)
        for model, workers in cases:
            seconds = options.deadline - time.monotonic()
            what = f"JPEGs, {model}, {workers} workers"
            attempt(what, partial(train, model, workers, options, jpegs, seconds), options.deadline)
    attempt("tests", partial(run_tests, options.deadline), options.deadline)


if __name__ == "__main__":
    main()
