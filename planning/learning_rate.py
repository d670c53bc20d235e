"""A search for a learning rate of its own, see `training.recipe.rate_search`: a whole launch with each rate."""

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
from training.config import FIELDS, REPO_ROOT
from training.config_check import OF_LAUNCHERS
from training.errors import DIVERGED_EXIT_CODE, TOO_MANY_BAD_STEPS_EXIT_CODE, UserError
from training.observe.run_folder import LEARNING_RATE, METRICS
from training.parallel.strategies import STRATEGIES
from training.recipe.rate_search import FEWEST_STEPS, HIGHEST, LOWEST, describe_search, final_loss, find_rate


@dataclass(frozen=True)
class RateSearch:
    """What was asked for: a launch, its first learning rate, and the range of the others."""

    launch: list[str]
    runs: Path
    name: str
    first: float
    lowest: float
    highest: float

    def run_folder(self, rate: float) -> Path:
        """The folder of the run with a rate."""
        return self.runs / f"{self.name}-{rate:g}"


class _LaunchEndedError(Exception):
    """A launch ended with an exit code that says nothing about its learning rate, or ran no training at all."""


def parse(arguments: Sequence[str], description: str | None) -> RateSearch:
    """Read the command line.

    Raises:
        UserError: for whatever the launcher or the trainer would refuse.
    """
    parser = OneLineParser("find_learning_rate", description)
    parser.add_number("--lowest", 1e-12, 1.0, default=LOWEST, help="Try no rate below this (default: 1e-6).")
    parser.add_number("--highest", 1e-9, 100.0, default=HIGHEST, help="Try no rate above this (default: 1).")
    parser.add_argument(
        "launch", nargs=argparse.REMAINDER, metavar="LAUNCH", help="Arguments of scripts/launch_distributed.sh."
    )
    given = parser.parse(arguments)
    if given.lowest >= given.highest:
        raise UserError(f"--lowest {given.lowest:g} must be below --highest {given.highest:g}.")
    asked = read_arguments("launch_distributed.sh", given.launch, {})  # by themselves, for a mistake in their number
    if (strategy := asked.positional["strategy"]) in OF_LAUNCHERS:
        raise UserError(f"a search plans no strategy: give {', '.join(STRATEGIES)} in place of {strategy}.")
    name = f"{time.strftime('learning-rate-%Y%m%d-%H%M%S')}-{os.getpid()}"  # others may start in the same second
    fixed = ["--log-every-steps", "1", "--early-stopping-patience", "0", "--max-restarts", "0", "--run-name", name]
    unused = sorted({word.partition("=")[0] for word in given.launch} & {*fixed[::2]})
    if unused:
        print(f"note: without effect in a search: {', '.join(unused)}")
    launch = [*given.launch, *fixed[:-2]]
    config = check_training(read_arguments("launch_distributed.sh", launch, {}).training)
    if config.base_batch_size:
        raise UserError("--base-batch-size: leave it out, the rates that are tried are those of this batch.")
    usual = FIELDS["learning_rate"].default if config.learning_rate == "auto" else config.learning_rate
    logs = Path(config.log_dir).expanduser() if config.log_dir else REPO_ROOT / "logs"
    first = min(max(usual, given.lowest), given.highest)
    return RateSearch(launch, logs / "runs", name, first, given.lowest, given.highest)


def search(asked: RateSearch) -> tuple[int, Path | None]:
    """Train with each rate, print the final losses, and return the exit code and the folder of the best run.

    Raises:
        UserError: if too few steps had a loss, or it did not fall.
    """

    def measure(rate: float) -> list[float | None]:
        _launch([*asked.launch, "--run-name", asked.run_folder(rate).name, "--learning-rate", repr(rate)])
        losses = read_losses(asked.run_folder(rate) / METRICS)
        if len(losses) < FEWEST_STEPS:
            raise UserError(f"{len(losses)} steps were trained, {FEWEST_STEPS} are needed: give more epochs.")
        return losses

    try:
        best, tried = find_rate(asked.first, asked.lowest, asked.highest, math.inf, measure)
    except _LaunchEndedError as ended:
        return int(ended.args[0]), None
    print("\nlearning rate   final training loss")
    for rate, losses in sorted(tried.items()):
        print(f"{rate:13.2g}   {final_loss(losses):.4f}")
    if best is None:
        raise UserError(
            f"no rate from {min(tried):.2g} to {max(tried):.2g} has clearly lowered the loss: give another "
            "--learning-rate to begin with, or more epochs."
        )
    folder = asked.run_folder(best)
    write_json(folder / LEARNING_RATE, describe_search(best, tried))
    print(f"\nsuggested    --learning-rate {best:g}\nlosses       {folder / LEARNING_RATE}")
    return 0, folder


def _launch(words: Sequence[str]) -> None:
    """Run the launcher to its end; raise `_LaunchEndedError` unless it has trained, or diverged."""
    code = subprocess.run(["bash", str(REPO_ROOT / "scripts" / "launch_distributed.sh"), *words]).returncode
    if code not in (0, DIVERGED_EXIT_CODE, TOO_MANY_BAD_STEPS_EXIT_CODE):
        raise _LaunchEndedError(code)


def read_losses(metrics: Path) -> list[float | None]:
    """Return the loss (nats) of every step, None of one that had none.

    Raises:
        _LaunchEndedError: if there was no training: under DRY_RUN=1 the launcher has printed its command alone.
    """
    if not metrics.exists():
        raise _LaunchEndedError(0)
    entries = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [entry["loss"] for entry in entries if entry["kind"] == "step"]
