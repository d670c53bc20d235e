"""How a rank starts: which it is by the launcher's variables, the store in which ranks meet, PyTorch's switches."""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.training.ranks import free_port
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import REPO_ROOT, TYPED
from zerovision.training.world.launchers import launched_world, line_to_go_on, remember_line
from zerovision.training.world.world import _listen, open_store, start_world

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
        ({"RANK": "1", "LOCAL_RANK": "1"}, r"incomplete \(RANK=1, LOCAL_RANK=1, WORLD_SIZE=missing"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"},
            "RANK=1 and WORLD_SIZE=4, but LOCAL_RANK is not set: .* several pods.* Run torchrun .* unset RANK WORLD",
        ),
    ],
)
def test_processes_that_would_train_alone_are_refused(monkeypatch, variables, message):
    """Those that rank 0 tells are in tests/references/errors.txt."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"^[^\n]*{message}[^\n]*$"):
        launched_world()
    assert "LOCAL_WORLD_SIZE" not in os.environ


@pytest.mark.parametrize(
    ("command", "script", "typed", "line"),
    [
        ("", "launch.sh", ["m", "ddp", "2"], "bash scripts/launch.sh m ddp 2"),
        ("", "launch.sh", ["m", "--run-name", "b", "--seed=1"], "bash scripts/launch.sh m --seed=1"),
        ("", "launch.sh", ["--resume=must", "--data", "my photos"], "bash scripts/launch.sh --data 'my photos'"),
        ("", "", [], "torchrun train.py"),
        ("launch", "launch_distributed.sh", ["vgg", "2", "--data", "a b"], "zerovision launch vgg 2 --data 'a b'"),
        ("launch", "launch_multi_node.sh", ["vgg", "2", "--data", "a b"], "zerovision launch vgg 2 --data 'a b'"),
    ],
)
def test_the_line_that_goes_on_with_a_run_is_the_launchers_or_the_commands_own(
    command, script, typed, line, monkeypatch
):
    monkeypatch.setenv("ZEROVISION_LINE", "")
    monkeypatch.setenv(TYPED, command)
    monkeypatch.chdir(REPO_ROOT)
    if script:
        remember_line(["bash"], script, typed)
    found = line_to_go_on("a", ["torchrun", "train.py", "--resume", "never"])
    assert found == f"{line} --run-name=a --resume=auto"


PATIENCE = datetime.timedelta(seconds=30)


def connect(port, run_id="run"):
    return open_store("127.0.0.1", port, PATIENCE, run_id, is_host=False, is_alone=True)


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def store(port):
    return open_store("127.0.0.1", port, PATIENCE, "run", is_host=True, is_alone=True)


def test_every_start_has_a_part_of_the_store_for_itself(store, port):
    same, other = connect(port), connect(port, "other")
    store.set("key", "value")
    assert same.get("key") == b"value"
    assert not other.check(["key"])


def test_the_store_listens_on_the_given_address_alone(store, port):
    """Linux answers on all of 127.0.0.0/8."""
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    with pytest.raises(OSError, match=rf"^port {port} is in use, and was free when the launcher checked it\.$"):
        open_store("127.0.0.1", port, PATIENCE, "run", is_host=True, is_alone=True)


@pytest.mark.parametrize(("address", "notes"), [("127.0.1.1", 0), ("192.0.2.7", 1)])
def test_an_address_that_leads_nowhere_is_not_listened_on_alone(port, address, notes, capfd):
    """A host's own name may mean 127.0.1.1 to itself; behind a gateway the others know a host by another address."""
    listener = socket.socket(fileno=_listen(address, port, is_alone=False))
    socket.create_connection(("127.0.0.1", port)).close()
    listener.close()
    assert capfd.readouterr().err.count(f"note: {address} is not an address of this machine") == notes


def test_an_unknown_name_is_one_line(port):
    with pytest.raises(UserError, match=r"^the address that the ranks meet on, no\.such\.host\.invalid: .*\.$"):
        open_store("no.such.host.invalid", port, PATIENCE, "run", is_host=True, is_alone=False)


# TF32 is asked for by the environment, and by what PyTorch does by itself for convolutions and LSTMs.
LOOK = """
import json, os, sys, torch
from zerovision.training.world.world import start_world, stop_world
backends = torch.backends
for deterministic in (False, True):
    start_world(deterministic=deterministic)
    fp32 = [backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision]
    print(json.dumps([
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        backends.cudnn.benchmark, os.environ.get("CUBLAS_WORKSPACE_CONFIG"), "tf32" in fp32,
        torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32,
    ]))
    stop_world()
"""


def test_the_switches(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    command = [sys.executable, "-W", "error", "-c", LOOK]
    result = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        [False, False, False, None, False, "highest", False],
        [True, True, False, ":4096:8", False, "highest", False],
    ]


class Joined(Exception):
    """Ends a start at the moment in which the process group is joined."""


@pytest.mark.parametrize(("gpus", "expected"), [(2, ("nccl", torch.device("cuda", 1))), (0, ("gloo", None))])
def test_the_process_group_is_bound_to_the_ranks_gpu(monkeypatch, gpus, expected) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    join = mock.Mock(side_effect=Joined)
    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(Joined):
        start_world()
    assert (join.call_args.args[0], join.call_args.kwargs.get("device_id")) == expected
