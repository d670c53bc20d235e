"""The learning-rate range test of its own, see `training.recipe.range_test`: a training whose rate grows."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.arguments import check_training, read_arguments
from training.checkpoint.atomic_write import write_json
from training.command_line import OneLineParser
from training.config import REPO_ROOT
from training.config_check import OF_LAUNCHERS
from training.errors import DIVERGED_EXIT_CODE, TOO_MANY_BAD_STEPS_EXIT_CODE, UserError
from training.observe.run_folder import LEARNING_RATE, METRICS
from training.parallel.strategies import STRATEGIES
from training.recipe.range_test import FEWEST_STEPS, HIGHEST, LOWEST, describe_range_test, with_a_loss
from training.recipe.schedule import SMALLEST_SHARE, head_epochs_of

ROWS = 16  # of the printed table


@dataclass(frozen=True)
class RangeTest:
    """What was asked for: a launch, and the range of its rates."""

    launch: list[str]
    run_folder: Path


def parse(arguments: Sequence[str], description: str | None) -> RangeTest:
    """Read the command line.

    Raises:
        UserError: for whatever the launcher or the trainer would refuse.
    """
    parser = OneLineParser("find_learning_rate", description)
    parser.add_number("--lowest", 1e-12, 1.0, default=LOWEST, help="Learning rate of the first step (default: 1e-6).")
    parser.add_number("--highest", 1e-9, 100.0, default=HIGHEST, help="Learning rate of the last step (default: 1).")
    parser.add_argument(
        "launch", nargs=argparse.REMAINDER, metavar="LAUNCH", help="Arguments of scripts/launch_distributed.sh."
    )
    given = parser.parse(arguments)
    if not SMALLEST_SHARE <= given.lowest / given.highest < 1:
        bounds = f"below --highest {given.highest:g}, and at least {SMALLEST_SHARE:g} of it"
        raise UserError(f"--lowest {given.lowest:g} must be {bounds}.")
    asked = read_arguments("launch_distributed.sh", given.launch, {})  # by themselves, for a mistake in their number
    if (strategy := asked.positional["strategy"]) in OF_LAUNCHERS:
        raise UserError(f"a range test plans no strategy: give {', '.join(STRATEGIES)} in place of {strategy}.")
    name = f"{time.strftime('learning-rate-%Y%m%d-%H%M%S')}-{os.getpid()}"  # others may start in the same second
    lowest, highest = f"{given.lowest / given.highest!r}", f"{given.highest!r}"
    sweep = ["--schedule", "sweep", "--fallback-schedule", "", "--warmup-epochs", "0", "--log-every-steps", "1"]
    sweep += ["--learning-rate", highest, "--final-learning-rate-scale", lowest]
    sweep += ["--early-stopping-patience", "0", "--mixup-off-epochs", "0"]  # every epoch like the others
    sweep += ["--run-name", name, "--save-every-minutes", "0", "--max-restarts", "0"]
    unused = sorted({word.partition("=")[0] for word in given.launch} & {*sweep[::2]})
    if unused:
        print(f"note: without effect in a range test: {', '.join(unused)}")
    launch = [*given.launch, *sweep]
    config = check_training(read_arguments("launch_distributed.sh", launch, {}).training)
    if config.base_batch_size:
        raise UserError("--base-batch-size: leave it out, the rates that are tried are those of this batch.")
    if head_epochs_of(config):
        launch += ["--head-epochs", str(config.epochs)]  # the backbone would join in the middle of the curve
    logs = Path(config.log_dir).expanduser() if config.log_dir else REPO_ROOT / "logs"
    return RangeTest(launch, logs / "runs" / name)


def find_rate(test: RangeTest) -> int:
    """Train, print the curve and the rate that it suggests, and return the exit code.

    Raises:
        UserError: if too few steps had a loss, or it did not fall.
    """
    code = subprocess.run(["bash", str(REPO_ROOT / "scripts" / "launch_distributed.sh"), *test.launch]).returncode
    if code not in (0, DIVERGED_EXIT_CODE, TOO_MANY_BAD_STEPS_EXIT_CODE):  # at its highest rates it may well diverge
        return code
    metrics = test.run_folder / METRICS
    if not metrics.exists():  # under DRY_RUN=1 the launcher has printed its command alone
        return code
    curve = read_curve(metrics)
    if len(curve) < FEWEST_STEPS:
        raise UserError(f"{len(curve)} steps had a loss, {FEWEST_STEPS} are needed: give more epochs.")
    result = describe_range_test(curve)
    write_json(test.run_folder / LEARNING_RATE, result)
    points = result["curve"]
    print("\nlearning rate   loss (smoothed)")
    for rate, _, mean in points[:: math.ceil(len(points) / ROWS)]:
        print(f"{rate:13.2g}   {mean:.4f}")
    if result["suggested"] is None:
        raise UserError(
            f"no rate from {points[0][0]:.2g} to {points[-1][0]:.2g} has clearly lowered the loss: give another "
            "--lowest and --highest, or more epochs."
        )
    print(f"\nsuggested    --learning-rate {result['suggested']:g}, a tenth of the rate of the smallest loss")
    print(f"curve        {test.run_folder / LEARNING_RATE}")
    return 0


def read_curve(metrics: Path) -> list[tuple[float, float]]:
    """Return learning rate and loss (nats) of every step that had one."""
    entries = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    points = ((entry["learning_rate"], entry["loss"]) for entry in entries if entry["kind"] == "step")
    return with_a_loss(points)
