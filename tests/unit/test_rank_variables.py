"""Which rank a process is under each launcher, by the variables that the launcher was seen to set."""

from __future__ import annotations

import os

import pytest

from zerovision.training.base.errors import UserError
from zerovision.training.base.places import REPO_ROOT
from zerovision.training.world.launchers import launched_world, line_to_go_on, remember_line

ACCELERATE = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no"}  # 1.15
SRUN = {
    **{"SLURM_STEP_NUM_TASKS": "5", "SLURM_NTASKS": "5", "SLURM_PROCID": "4", "SLURM_LOCALID": "0"},
    **{"SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_JOB_ID": "123456"},
}
MASTER = ("MASTER_ADDR", "MASTER_PORT")
ALONE = (0, 0, 1, 1)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Without the variables of a launcher that started these tests, and without those that a test adds."""
    environment = dict(os.environ)
    for name in environment:
        if name.startswith(("SLURM_", "ACCELERATE_", "PET_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", *MASTER):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "ranks", "master"),
    [
        (SRUN | {"SLURM_STEP_NODELIST": "gpu[03-05,9]"}, (4, 0, 1, 5), ("gpu03", "23456")),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu-a,gpu-b[1-2]", MASTER[1]: "77"}, (4, 0, 1, 5), ("gpu-a", "77")),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}, (4, 0, 5, 5), ("127.0.0.1", "23456")),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, ALONE, None),
        # in the script of a job of 4 tasks, and in a shell that srun opened
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, ALONE, None),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "41000"}, ALONE, None),
        (ACCELERATE, ALONE, None),
        # a job of one pod
        ({"RANK": "0", "WORLD_SIZE": "1"}, ALONE, None),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"}, ALONE, None),
        # the ranks that our agents and torchrun start under srun
        (SRUN | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, (1, 1, 2, 2), None),
    ],
)
def test_every_launchers_ranks_are_known(monkeypatch, variables, ranks, master):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched_world() == ranks
    if master is None:
        assert not {*MASTER} & os.environ.keys()
    else:
        # what PyTorch and DeepSpeed read
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", *MASTER)
        assert tuple(os.environ[name] for name in names) == (*map(str, ranks), *master)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (ACCELERATE | {"MASTER_ADDR": "127.0.0.1"}, r"accelerate .* give it --multi_gpu.* torchrun --nproc_per_node=N"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": ""}, "srun started 5 processes.* torchrun --nproc_per_node=N"),
        ({"RANK": "1", "LOCAL_RANK": "1"}, "incomplete: RANK=1, LOCAL_RANK=1, WORLD_SIZE=missing"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"},
            "RANK=1, WORLD_SIZE=4, but no LOCAL_RANK: this is one of several pods.* Type torchrun .* unset RANK WORLD",
        ),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "1"},
            "PET_NNODES=2, but .* Type torchrun .* unset PET_NNODES",
        ),  # TrainJob
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4, but no LOCAL_RANK"),
    ],
)
def test_processes_that_would_train_alone_are_refused(monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"^[^\n]*{message}[^\n]*$"):
        launched_world()
    assert "LOCAL_WORLD_SIZE" not in os.environ


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["m", "ddp", "2"], "bash scripts/launch.sh m ddp 2 --run-name=a --resume=auto"),
        (["m", "--run-name", "b", "--seed=1"], "bash scripts/launch.sh m --seed=1 --run-name=a --resume=auto"),
        (
            ["--resume=must", "--data", "my photos"],
            "bash scripts/launch.sh --data 'my photos' --run-name=a --resume=auto",
        ),
        (None, "torchrun train.py --run-name=a --resume=auto"),
    ],
)
def test_the_line_that_goes_on_with_a_run_is_the_launchers_own(typed, line, monkeypatch):
    monkeypatch.setenv("ZEROVISION_LINE", "")
    monkeypatch.chdir(REPO_ROOT)
    if typed is not None:
        remember_line(["bash"], "launch.sh", typed)
    assert line_to_go_on("a", ["torchrun", "train.py", "--resume", "never"]) == line
