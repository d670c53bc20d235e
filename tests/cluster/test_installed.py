"""The launchers start an installed copy on two nodes, far from a checkout; its weights are those of a checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.cluster.hosts import SHARED, Hosts
from tests.cluster.trainings import RUN, flags, train_on_login
from tests.wheel import build_wheel

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MODEL, RECIPE = "timm:test_convnext", ("--learning-rate", "0.004")
MASTER = ["--master_addr=node01", "--master_port=29511"]
TRAINER = "zerovision.commands.train_distributed"


@pytest.fixture(scope="module")
def python(_hosts: Hosts) -> str:
    """The interpreter of an environment with the wheel, which takes all else from this one."""
    home = SHARED / "installed"
    shutil.rmtree(home, ignore_errors=True)
    wheel = build_wheel(home / "copy")
    subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
    found = home / "venv/bin/python"
    subprocess.run([found, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel], check=True)
    shutil.rmtree(home / "copy")
    (packages,) = (home / "venv/lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return str(found)


@pytest.fixture(scope="module")
def of_checkout(_hosts: Hosts) -> bytes:
    """The weights that two ranks of one machine leave, started from the checkout."""
    folder = SHARED / "of-checkout"
    shutil.rmtree(folder, ignore_errors=True)
    run = train_on_login(_hosts, folder, [MODEL, "ddp", "2", "16", "1", *flags(folder, *RECIPE)])
    return (run / "model.safetensors").read_bytes()


def weights(folder: Path) -> bytes:
    return (folder / "logs/runs" / RUN / "model.safetensors").read_bytes()


@pytest.mark.parametrize("where", [[], ["--hosts", "node01,node02"]])
def test_zerovision_launch(hosts: Hosts, shared: Path, python: str, of_checkout: bytes, where: list[str]) -> None:
    sizes = ["2", "1"] if where else ["2"]
    command = [str(Path(python).with_name("zerovision")), "launch", MODEL, "ddp", *sizes, "16", "1", *where]
    result = hosts.run("login", [*command, *flags(shared, *RECIPE)], timeout=240, cwd=shared)
    assert result.returncode == 0, result.stdout + result.stderr
    assert weights(shared) == of_checkout


@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", *MASTER, "--node_rank={}", "-m"],
        ["deepspeed.launcher.runner", "--hostfile=hosts", "--no_ssh", *MASTER, "--node_rank={}", "--module"],
    ],
)
def test_other_launchers(hosts: Hosts, shared: Path, python: str, of_checkout: bytes, launcher: list[str]) -> None:
    (shared / "hosts").write_text("node01 slots=1\nnode02 slots=1\n")
    given = ["--model-type", MODEL, "--batch-size", "16", "--epochs", "1", *flags(shared, *RECIPE)]
    outputs = [shared / "node01.txt", shared / "node02.txt"]
    started = [
        hosts.start(
            output.stem,
            [python, "-m", *(word.format(number) for word in launcher), TRAINER, *given],
            cwd=shared,
            output=output,
            DS_ACCELERATOR="cpu",
        )
        for number, output in enumerate(outputs)
    ]
    assert [one.wait(240) for one in started] == [0, 0], outputs[0].read_text()
    assert weights(shared) == of_checkout


def test_srun(slurm: Hosts, shared: Path, python: str, of_checkout: bytes) -> None:
    given = ["--model-type", MODEL, "--batch-size", "16", "--epochs", "1", *flags(shared, *RECIPE)]
    options = ["--wait", "--nodes=2", "--ntasks=2", "--gpus-per-node=1", f"--output={shared}/job.txt"]
    job = ["--wrap", f"cd {shared}; srun --kill-on-bad-exit {python} -m {TRAINER} {' '.join(given)}"]
    result = slurm.run("login", ["timeout", "200", "sbatch", *options, *job], timeout=220)
    assert result.returncode == 0, (shared / "job.txt").read_text()
    assert weights(shared) == of_checkout
