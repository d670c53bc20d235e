"""Starts real trainings the way a user does, and reads what they leave."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.kit import ROOT, call
from zerovision.training.config.command_line import run_script

ENTRY = "scripts/train_distributed.py"
TIMEOUT_SECONDS = 600


def environment() -> dict[str, str]:
    """The user's environment, with this Python's tools first, as the launchers arrange it."""
    dropped = ("MASTER_PORT", "DRY_RUN", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"PATH": f"{Path(sys.executable).parent}:{kept['PATH']}"}


def run_command(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root and wait for it."""
    return subprocess.run(
        words,
        cwd=ROOT,
        env=environment() | changes,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def launch(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/launch_distributed.sh with these words."""
    return run_command("bash", "scripts/launch_distributed.sh", *words, **changes)


def train_alone(*flags: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the entry in one process, without a launcher."""
    return run_command(sys.executable, ENTRY, *flags, OMP_NUM_THREADS="1", **changes)


def command_here(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `zerovision.commands` in this process."""
    return subprocess.CompletedProcess(words, *call(name, *words))


def train_here(*flags: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the entry as `train_alone` does, but in this process, which has imported already what it needs."""
    from zerovision.commands.train_distributed import train

    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [ENTRY, *flags]),
        mock.patch.dict(os.environ, environment() | {"OMP_NUM_THREADS": "1"} | changes, clear=True),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        torch.set_num_threads(1)
        exit_code = run_script("error", list, train)
    return subprocess.CompletedProcess(flags, exit_code, output.getvalue(), errors.getvalue())


def read_metrics(run_folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the run's metrics.jsonl lines of one kind, 'step' or 'epoch'."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def read_epochs(run_folder: Path) -> dict[int, tuple[float, ...]]:
    """Return losses and accuracies of each epoch in the run's metrics.jsonl."""
    names = ("train_loss", "train_top1", "val_loss", "val_top1")
    return {entry["epoch"]: tuple(entry[name] for name in names) for entry in read_metrics(run_folder, "epoch")}


def assert_success(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Check for exit code 0; return the result."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def assert_user_error(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Check for exit code 2, one line that holds the words, and no traceback."""
    assert result.returncode == 2, result.stdout + result.stderr
    errors = [line for line in result.stderr.splitlines() if not line.startswith("no GPU found")]
    assert len(errors) == 1, result.stderr
    for word in words:
        assert word in errors[0]
    assert "Traceback" not in result.stdout
