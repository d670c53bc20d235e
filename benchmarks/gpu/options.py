"""What `run.py` tells its parts: how long, on what, how much, which models."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.measure import QUICK, Effort

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Options:
    """Of a part.

    Attributes:
        deadline: of `time.monotonic()`; nothing begins later, and `run.py` ends the part soon after.
        effort: how much is measured.
        models: instead of the part's own; empty for those.
        only_compile: nothing is measured; the compiler keeps what it makes.
    """

    deadline: float
    effort: Effort
    models: tuple[str, ...]
    only_compile: bool

    @property
    def is_quick(self) -> bool:
        """Whether this is only to see that it runs."""
        return self.effort is QUICK


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of what `run.py` and its parts have in common."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--quick", action="store_true", help="tiny: to see that it runs")
    made.add_argument("--models", default="", help="comma-separated, instead of each part's own")
    return made


def part_options(description: str | None) -> Options:
    """Read the arguments of a part, and choose the device."""
    made = parser(description)
    made.add_argument("--seconds", type=float, default=150, help="for this part")
    made.add_argument("--only-compile", action="store_true", help="compile, measure nothing")
    given = made.parse_args()
    deadline = time.monotonic() + given.seconds
    if given.device == "cpu":
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    elif not torch.cuda.is_available():
        raise SystemExit("no GPU found: type --device cpu --quick to see that the script runs")
    models = tuple(given.models.split(",")) if given.models else ()
    return Options(deadline, QUICK if given.quick else Effort(), models, given.only_compile)
