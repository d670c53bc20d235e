"""Sweeps whose trials train on the machines of a hostfile, and as the tasks of a Slurm array."""

from __future__ import annotations

import json
import shlex
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


def test_the_tasks_of_an_array_are_trials_and_the_same_line_compares_them(slurm: Hosts, shared: Path) -> None:
    wrapped = shlex.join(line(shared, "--trial=TASK")).replace("TASK", '"$SLURM_ARRAY_TASK_ID"')
    options = ["--wait", "--array=1-3", "--gpus-per-node=1", f"--output={shared}/%a.out", f"--chdir={REPO_ROOT}"]
    done = slurm.run("login", ["timeout", "280", "sbatch", *options, "--wrap", wrapped], timeout=300)
    outputs = "".join(path.read_text() for path in shared.glob("*.out"))
    assert done.returncode == 0, outputs
    assert outputs.count("finished") == 3
    states = [json.loads((shared / f"logs/sweeps/seeds/{number:03}.json").read_text()) for number in (1, 2, 3)]
    assert {(state["epochs"], state["state"]) for state in states} == {(1, "finished")}
    compared = slurm.run("login", line(shared), timeout=60)
    assert compared.returncode == 0, compared.stderr
    assert "best         bash scripts/launch_distributed.sh basic_cnn" in compared.stdout
    assert (shared / "logs/sweeps/seeds/sweep.html").exists()
    assert len({weights(shared, seed) for seed in range(3)}) == 3


def test_an_array_for_each_rung_trains_the_better_trial_to_the_bytes_of_its_command(slurm: Hosts, shared: Path) -> None:
    words = [*WORDS[:4], "3", *WORDS[5:], f"--log-dir={shared}/logs"]
    varied = ["halved", "--vary", "learning-rate=0.0001,0.01", "--halving", "2"]
    wrapped = shlex.join([*SWEEP[:2], *varied, "--trial=TASK", "--", *words]).replace("TASK", '"$SLURM_ARRAY_TASK_ID"')
    options = f"--array=1-2 --gpus-per-node=1 --output={shared}/%A-%a.out --chdir={REPO_ROOT}"
    script = f"""
    for rung in 1 2; do
        job=$(sbatch --parsable ${{job:+--dependency=afterany:$job}} {options} --wrap {shlex.quote(wrapped)})
    done
    timeout 280 sbatch --wait --dependency=afterany:$job --output=/dev/null --wrap true
    """
    done = slurm.run("login", ["bash", "-ec", script], timeout=300)
    outputs = "".join(path.read_text() for path in sorted(shared.glob("*.out")))
    assert done.returncode == 0, done.stderr + outputs
    states = [json.loads((shared / f"logs/sweeps/halved/{number:03}.json").read_text()) for number in (1, 2)]
    assert [(state["epochs"], state["state"]) for state in states] == [(2, "paused"), (3, "finished")], outputs
    alone = ["bash", str(REPO_ROOT / "scripts/launch_distributed.sh"), *words, "--learning-rate=0.01"]
    assert slurm.run("login", [*alone, "--run-name=alone"], timeout=120).returncode == 0
    runs = [shared / f"logs/runs/{name}/model.safetensors" for name in ("halved-2", "alone")]
    assert runs[0].read_bytes() == runs[1].read_bytes()
