"""Sweeps whose trials train on the machines of a hostfile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import REPO_ROOT, Hosts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

WORDS = ["basic_cnn", "ddp", "1", "32", "1", "--tensorboard=false", "--report=false"]
SWEEP = [sys.executable, str(REPO_ROOT / "scripts/sweep.py"), "seeds", "--vary", "seed=0,1,2"]


def line(shared: Path, *own: str) -> list[str]:
    """The sweep's command."""
    return [*SWEEP, *own, "--", *WORDS, f"--log-dir={shared}/logs"]


def weights(shared: Path, seed: int) -> bytes:
    """Of the trial with a seed."""
    return (shared / f"logs/runs/seeds-{seed + 1}/model.safetensors").read_bytes()


def test_trials_train_on_the_machines_of_a_hostfile_and_one_that_is_down_gets_none(hosts: Hosts, shared: Path) -> None:
    hosts.fault("node02", "poweroff")
    hostfile = shared / "hostfile.txt"
    hostfile.write_text("node01 slots=1\nnode02 slots=1\nnode03 slots=1\n")
    found = hosts.run("login", line(shared, f"--hostfile={hostfile}"), timeout=300, START_TIMEOUT="20")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stderr.count("node02: exit code 69: ") == 1
    logs = [(shared / f"logs/sweeps/seeds/{number:03}.log").read_text() for number in (1, 2, 3)]
    used = {node for node in hosts.nodes for log in logs if f" CPU rank: {node} (" in log}
    assert used == {"node01", "node03"}, logs  # also by the trial that was sent to node02 first
    alone = ["bash", str(REPO_ROOT / "scripts/launch_distributed.sh"), *WORDS, "--seed=1", "--run-name=alone"]
    assert hosts.run("login", [*alone, f"--log-dir={shared}/logs"], timeout=120).returncode == 0
    assert (shared / "logs/runs/alone/model.safetensors").read_bytes() == weights(shared, 1)
