"""One GPU in one call of under ten minutes: the GPU tests first, then ours against a plain loop and timm's.

    python benchmarks/gpu/run.py
    python benchmarks/gpu/run.py --models mobilenet,timm:resnet50 --minutes 4 --no-tests
    python benchmarks/gpu/run.py --device cpu --quick

Each model runs at the guide's batch size and at the best one, at 224 pixels in bf16, on images that lie on the device.
The contestants take turns in shuffled order; medians over the rounds. Writes `results/<model>_<hardware>_<date>.md`
and `gpu_tests.log`, or both into $OUT. What does not fit into the time is left out, with a line that says so.

To carry to a machine without a network: the repository, and as wheels what `requirements.txt` and pytest with
pytest-timeout need and `pip list` does not show there; PyTorch and torchvision stay as they are (2.11 or later).
`benchmarks/gpu/README.md` has the commands.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.gpu.measure import QUICK, Effort, best_batch, compare, release
from benchmarks.gpu.points import measure_points
from benchmarks.report import Section, results_folder, save, show, versions
from training.parallel.world import World, start_world, stop_world

ROOT = Path(__file__).resolve().parents[2]
# Model -> images per GPU as the guide recommends for ddp (the ensemble: for stage 2); ResNet-50 is not in it.
GUIDE_BATCHES = {"mobilenet": 32, "efficientnet": 16, "vgg": 8, "cnn_lstm": 8, "ensemble": 8, "timm:resnet50": 64}
LONGEST_TAIL = 6000  # characters of the tests' output that are printed; the file has all
SHARE_FOR_TESTS = 0.5  # at most; what they leave goes to the tables


def measure_model(model: str, effort: Effort, world: World, deadline: float) -> list[Section]:
    """Measure one model at the guide's batch size and at the best one."""
    sections = []
    guide = GUIDE_BATCHES.get(model, 32) if effort is not QUICK else effort.batches[0]
    for batch_size in dict.fromkeys((guide, None)):
        if time.monotonic() > deadline:
            print(f"left out, no time: {model} at {batch_size or 'its best batch size'}", flush=True)
            continue
        try:
            chosen = batch_size or best_batch(model, effort, world, deadline)
            if batch_size is None and chosen == guide:
                continue
            sections.append(compare(model, chosen, effort, world, deadline))
            show(sections[-1])
        except Exception as error:  # time on a GPU is dear: whatever happened, the other models are still measured
            traceback.print_exc()
            print(f"left out: {model} at {batch_size or 'its best batch size'}: {type(error).__name__}", flush=True)
        release(world)
    return sections


def run_gpu_tests(seconds: float) -> None:
    """Run the tests marked `gpu` for at most so long, and keep what they print."""
    log = results_folder() / "gpu_tests.log"
    command = [
        sys.executable,
        "-u",
        "-m",
        "pytest",
        "-m",
        "gpu",
        "tests/gpu",
        "-p",
        "no:cacheprovider",
        "--durations=10",
    ]
    with log.open("w") as output:
        try:
            code = subprocess.run(
                command, check=False, cwd=ROOT, timeout=seconds, stdout=output, stderr=output
            ).returncode
            said = f"exit code {code}"
        except subprocess.TimeoutExpired:
            said = f"ended after {seconds:.0f} s, not finished"
    print(log.read_text()[-LONGEST_TAIL:])
    print(f"pytest -m gpu: {said}; {log}", flush=True)


def main() -> None:
    """Test, then measure every model that the time allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(GUIDE_BATCHES), help="comma-separated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny: to see that it runs")
    parser.add_argument("--minutes", type=float, default=9, help="no section begins later")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--points", action="store_true", help="measure the 40 predicted points instead of the tables")
    given = parser.parse_args()
    start = time.monotonic()
    if given.device == "cpu":
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    elif not torch.cuda.is_available():
        sys.exit("no GPU found: type --device cpu --quick to see that the script runs")
    if not given.no_tests:  # before this process takes memory of the GPU
        run_gpu_tests(SHARE_FOR_TESTS * 60 * given.minutes)
    effort = QUICK if given.quick else Effort()
    world = start_world()
    deadline = start + 60 * given.minutes
    models = [] if given.points else given.models.split(",")
    if given.points:
        measure_points(effort, world, deadline, shlex.join(["python", *sys.argv]))
    for number, model in enumerate(models):
        # Each model has its share of what is left, so that a slow one takes nothing from those after it.
        share = (deadline - time.monotonic()) / (len(models) - number)
        sections = measure_model(model, effort, world, time.monotonic() + share)
        if sections:
            facts = (
                f"{world.describe()}; {effort.image_size} pixels, {effort.num_classes} classes, bf16, AdamW, "
                f"no clipping, channels_last images on the device. "
                f"{versions('torch', 'torchvision', 'deepspeed', 'timm')}."
            )
            name = model.replace("timm:", "")
            save(name, f"{model}: ours, a plain loop, timm's loop", facts, shlex.join(["python", *sys.argv]), sections)
    stop_world()
    print(f"done after {(time.monotonic() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
