"""Asks a process on pretended GPUs for trainings, and compares what it saw with the table of expected.json.

.venv/bin/python -m tests.gpu.pretended.client > expected.json     # measure the table again, then read the diff
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from tests.gpu.pretended.library import ROOT, build, environment

EXPECTED = Path(__file__).with_name("expected.json")
MOST_KERNELS, FEWEST_KERNELS = 1.05, 0.8  # of the table's: with fewer the table is out of date, or nothing was trained
LINES_OF_A_FAILURE = 15

RECIPES = {
    "plain": "--batch-size 72",
    # what changes weights or batches beside the optimizer
    "averaged": "--batch-size 36 --gradient-accumulation-steps 2 --ema 0.9 --mixup 0.2 --gradient-clipping 1",
    # both have to read on the host whether the gradient is finite
    "fp16": "--batch-size 72 --precision fp16 --optimizer lion",
}
PLACES = [("ddp", "torch"), ("ddp", "deepspeed"), ("fsdp_stage3", "torch")]
# By name, the flags of a training, and its GPUs.
CASES = {
    f"{strategy} {engine} {recipe}": (f"--strategy {strategy} --engine {engine} {flags}", 1)
    for (strategy, engine), (recipe, flags) in product(PLACES, RECIPES.items())
}
# Batches that are pinned by PyTorch's loader; two GPUs, though not with DeepSpeed: its ranks compare numbers that went
# through NCCL, and stop.
CASES |= {"ddp torch workers": ("--strategy ddp --engine torch --batch-size 72 --workers 1", 1)}
CASES |= {
    f"{strategy} torch 2 GPUs": (f"--strategy {strategy} --engine torch --batch-size 36", 2)
    for strategy in ("ddp", "fsdp_stage3")
}


class PretendedGpus:
    """A process that trains on pretended GPUs, see `server`."""

    def __init__(self) -> None:
        """Start it.

        Raises:
            CannotBuildError: see `library.build`.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.pretended.server"],
            cwd=ROOT,
            env=os.environ | environment(build()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, gpus: int = 1, **arguments: str) -> dict[str, Any]:
        """Return what a job found, see `server.run`.

        Raises:
            RuntimeError: if the process has ended; its own error is on standard error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            job = {"name": name, "gpus": gpus, "arguments": arguments}
            print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process on pretended GPUs has ended: see what it has printed")
        return json.loads(answer)

    def train(self, case: str, fault: str = "") -> dict[str, Any]:
        """Return what was seen of a case's training, with a fault planted."""
        flags, gpus = CASES[case]
        return self.run("train", gpus, flags=f"--model-type basic_cnn {flags}", fault=fault)

    def close(self) -> None:
        """End it at once: between two jobs it has nothing to clean up."""
        self._process.kill()
        self._process.communicate()


def problems(report: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return a line for each thing in which a training was not as the table says."""
    if "failure" in report:
        printed = report["failure"].splitlines()
        errors = [line for line in printed if re.match(r"[\w.]*Error: ", line)]
        return errors or ["\n".join(printed[-LINES_OF_A_FAILURE:])]
    found = [f"new warning: {warning}" for warning in report["warnings"]]
    for place in sorted({*report["waits"], *expected["waits"]}):
        now, before = (of["waits"].get(place, 0) for of in (report, expected))
        if now != before:
            found.append(f"waits of a step: {place}: {now}, expected {before}")
    if not FEWEST_KERNELS <= report["kernels"] / expected["kernels"] <= MOST_KERNELS:
        found.append(f"kernels of a step: {report['kernels']}, expected {expected['kernels']}")
    return found


def main() -> None:
    """Print the table, measured."""
    gpus = PretendedGpus()
    table = {}
    for case in CASES:
        report = gpus.train(case)
        if "failure" in report:
            sys.exit(f"{case}: {report['failure']}")
        table[case] = {"kernels": report["kernels"], "waits": report["waits"]}
    gpus.close()
    print(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
