"""What a process has of its machine: its container's share, its GPUs, and what malloc keeps between steps."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from launching import REPO_ROOT, pretend_gpus

from zerovision.launch.node_launcher import malloc_variables
from zerovision.training.base import control_groups
from zerovision.training.base.control_groups import cpu_quota, limit_threads, quota_note, usable_cores, usable_memory
from zerovision.training.base.errors import UserError
from zerovision.training.data import DataOptions
from zerovision.training.data.loader import most_workers
from zerovision.training.data.reading import sources
from zerovision.training.world import machine
from zerovision.training.world.preserved_process import preserved_process
from zerovision.training.world.world import _choose_device, start_world

NEW, OLD = "sys/fs/cgroup", "sys/fs/cgroup/cpu"


def write_files(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def old(group, quota, period=100000, top=OLD):
    return {f"{top}/{group}/cpu.cfs_quota_us": f"{quota}\n", f"{top}/{group}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("groups", "files", "quota", "cores"),
    [
        ("", {}, math.inf, 8),
        ("0::/job\n", {f"{NEW}/job/cpu.max": "max 100000\n"}, math.inf, 8),
        ("0::/job\n", {f"{NEW}/job/cpu.max": "150000 100000\n"}, 1.5, 2),
        ("0::/job\n", {f"{NEW}/job/cpu.max": "1000 100000\n"}, 0.01, 1),
        ("0::/job\n", {f"{NEW}/job/cpu.max": "6400000 100000\n"}, 64, 8),  # more than there are
        ("0::/job\n", {f"{NEW}/job/cpu.max": "odd\n"}, math.inf, 8),
        ("0::/\n", {f"{NEW}/cpu.max": "200000 100000\n"}, 2, 2),  # a namespace of its own
        ("0::/outside\n", {f"{NEW}/cpu.max": "200000 100000\n"}, 2, 2),
        ("0::/pod/job\n", {f"{NEW}/pod/cpu.max": "300000 100000\n", f"{NEW}/pod/job/cpu.max": "max 1\n"}, 3, 3),
        ("4:cpu:/job\n0::/\n", old("job", 100000), 1, 1),
        ("4:cpu:/job\n0::/\n", old("job", -1), math.inf, 8),
        ("4:cpu:/pod/job\n", {**old("pod/job", -1), **old("pod", 50000, 20000)}, 2.5, 3),
        ("4:cpu,cpuacct:/job\n", old("job", 100000, top="sys/fs/cgroup/cpu,cpuacct"), 1, 1),
        ("4:cpu,cpuacct:/job\n", old("job", 100000), 1, 1),
        ("4:memory:/\n0::/job\n", {f"{NEW}/unified/job/cpu.max": "100000 100000\n"}, 1, 1),  # both versions
        ("4:cpuset:/job\n", old("job", 100000, top="sys/fs/cgroup/cpuset"), math.inf, 8),
    ],
)
def test_cores_are_those_of_affinity_and_quota(groups, files, quota, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    write_files(tmp_path, {"proc/self/cgroup": groups, **files})
    assert (cpu_quota(tmp_path), usable_cores(tmp_path)) == (quota, cores)
    assert quota_note(tmp_path) == (f"a CPU quota of {quota:g} of 8 cores" if quota < 8 else "")


def memory(group, limit, top=NEW, name="memory.max"):
    return {f"{top}/{group}/{name}": f"{limit}\n"}


OLD_MEMORY = {"top": "sys/fs/cgroup/memory", "name": "memory.limit_in_bytes"}


@pytest.mark.parametrize(
    ("groups", "files", "kib"),
    [
        ("", {}, 8000),
        ("0::/job\n", memory("job", "max"), 8000),
        ("0::/job\n", memory("job", 2048000), 2000),
        ("0::/job\n", memory("job", 2048000, name="memory.high"), 2000),
        ("0::/job\n", memory("job", 20480000), 8000),  # more than there is
        ("0::/\n", memory(".", 2048000), 2000),  # a container with a namespace of its own
        # Slurm sets the limit of the job or the step, systemd that of the scope or of a slice around it.
        (
            "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
            memory("system.slice/slurmstepd.scope/job_7", 3072000)
            | memory("system.slice/slurmstepd.scope/job_7/step_0/user/task_0", "max"),
            3000,
        ),
        ("0::/user.slice/user-1000.slice/run-u1.scope\n", memory("user.slice/user-1000.slice", 1024000), 1000),
        ("4:memory:/slurm/uid_0/job_7/step_0\n0::/\n", memory("slurm/uid_0/job_7", 1024000, **OLD_MEMORY), 1000),
        ("4:memory:/job\n", memory("job", 2**63 - 4096, **OLD_MEMORY), 8000),  # none, under version 1
    ],
)
def test_caches_in_memory_take_a_quarter_of_what_machine_and_control_groups_allow(
    groups, files, kib, tmp_path, monkeypatch
):
    meminfo = "MemTotal: 8000 kB\nMemAvailable: 7000 kB\n"
    write_files(tmp_path, {"proc/meminfo": meminfo, "proc/self/cgroup": groups, **files})
    assert usable_memory(tmp_path) == 1024 * kib
    monkeypatch.setattr(sources, "usable_memory", lambda: usable_memory(tmp_path))
    assert sources._location(DataOptions(cache="ram"))[1] == 256 * kib


def test_threads_and_workers_follow_a_quota(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert most_workers() == 63
    monkeypatch.setattr(control_groups, "cpu_quota", lambda root=None: 2.5)
    assert (most_workers(), most_workers(2)) == (2, 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        limit_threads()
        assert torch.get_num_threads() == 3
        torch.set_num_threads(2)  # somebody's own choice
        limit_threads()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tool", ["", "#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n"], ids=["missing", "broken"])
def test_gpus_are_counted_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    """As in a container with the driver's capability to compute alone, that has GPUs 2 and 10 of its machine."""
    for name in ("nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    if tool:
        (tmp_path / "nvidia-smi").write_text(tool)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "DEVICE_FILES", tmp_path)
    assert machine.machine_gpus() == ["0", "1"]


def test_nvidia_smi_knows_better_than_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DEVICE_FILES", tmp_path)
    for count in (3, 0):
        monkeypatch.setenv("PATH", pretend_gpus(tmp_path, count))
        (tmp_path / "nvidia7").touch()
        assert machine.machine_gpus() == [str(number) for number in range(count)]


DEEPSPEED = """
import sys
from tests.training.engine_ranks import configuration, make_engine, make_model
from zerovision.training.world.preserved_process import preserved_process
from zerovision.training.world.world import start_world
make_engine(start_world(), make_model(True), configuration(engine="deepspeed"))
import deepspeed
print(deepspeed.accelerator.get_accelerator().device_name(), vars(deepspeed.ops)["__compatible_ops__"])
print("torch._inductor.ir" in sys.modules)
"""


@pytest.mark.slow
def test_deepspeed_gets_the_ranks_device_looks_for_no_operators_and_imports_no_compiler() -> None:
    """Also where the environment says otherwise: this rank has no GPU."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cuda", "PYTHONPATH": str(REPO_ROOT)}
    done = subprocess.run([sys.executable, "-c", DEEPSPEED], env=environment, capture_output=True, text=True)
    assert done.stdout == "cpu {}\nFalse\n", done.stderr[-3000:]


NO_DRIVER = pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")


@NO_DRIVER
def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", pretend_gpus(tmp_path, 2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with preserved_process(), pytest.raises(UserError) as refusal:
        start_world()
    said = f"torch {torch.__version__} cannot use the 2 GPUs of this machine: Found no NVIDIA driver"
    assert said in str(refusal.value)
    assert "CUDA_VISIBLE_DEVICES= " in str(refusal.value)
    assert "\n" not in str(refusal.value)


@NO_DRIVER
@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_mean_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("PATH", pretend_gpus(tmp_path, 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert _choose_device(0, 2) == torch.device("cpu")


@pytest.fixture
def seen_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str | None], None]:
    """A function that lets torch see some GPUs, with a value of CUDA_VISIBLE_DEVICES or without one."""

    def see(count: int, visible: str | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    return see


@pytest.mark.parametrize(
    ("visible", "count", "local_rank", "index"),
    [(None, 4, 3, 3), ("2", 1, 3, 0), ("GPU-1b2c", 1, 1, 0), ("4,2", 2, 1, 1)],
)
def test_a_rank_has_the_gpu_that_it_alone_sees(seen_gpus, visible, count, local_rank, index) -> None:
    """`srun --gpus-per-task=1` lets each task see its own."""
    seen_gpus(count, visible)
    assert _choose_device(local_rank, 4 if count == 1 else count) == torch.device("cuda", index)


@pytest.mark.parametrize(("visible", "count"), [(None, 1), ("2,3", 2)])
def test_more_ranks_than_gpus_are_refused(seen_gpus, visible, count) -> None:
    seen_gpus(count, visible)
    with pytest.raises(UserError, match=f"^4 GPUs requested, but only {count} present"):
        _choose_device(1, 4)


def test_ranks_on_one_gpu_are_refused_in_nccls_stead(monkeypatch) -> None:
    """What NCCL says if CUDA_VISIBLE_DEVICES is one GPU, the same for all."""
    error = dist.DistBackendError("ncclInvalidUsage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on")
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=error))
    with preserved_process(), pytest.raises(UserError, match=r"^several ranks share one GPU[^\n]*$"):
        start_world()
    gone = dist.DistNetworkError("Failed to recv, got 0 bytes.\nframe #0: c10::Error")  # rank 0 of another run ended
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=gone))
    with preserved_process(), pytest.raises(OSError, match=r"^this rank could not join the others: Failed[^\n]*$"):
        start_world()


TENSORS, TENSOR_BYTES = 10, 20 * 2**20
SCRIPT = f"""
import ctypes

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
Figures = type("mallinfo2", (ctypes.Structure,), {{"_fields_": [(name, ctypes.c_size_t) for name in FIELDS]}})
libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype, libc.free.argtypes = Figures, ctypes.c_void_p, [ctypes.c_void_p]

def step():
    for pointer in [libc.malloc({TENSOR_BYTES}) for _ in range({TENSORS})]:
        libc.free(pointer)

step(), step()  # malloc raises its own thresholds in the first
print(libc.mallinfo2().fordblks)
"""


# Bytes of malloc's own: a tensor's small allocations may lie above it and keep it from being given back, and how many
# page faults there are is also the kernel's choice.
@pytest.mark.parametrize("keeps", [True, False])
def test_bytes_that_are_kept_after_a_step(keeps):
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **(malloc_variables({}, False) if keeps else {})}
    command = [sys.executable, "-c", SCRIPT]
    kept = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    of_a_step = TENSORS * TENSOR_BYTES
    assert kept >= of_a_step if keeps else kept < of_a_step / 2


@pytest.mark.parametrize("reason", ["a GPU rank", "MALLOC_PERTURB_", "RLIMIT_AS", "RLIMIT_DATA"])
def test_malloc_is_left_alone(monkeypatch, reason):
    limits = {getattr(resource, reason, None): (2**40, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: limits.get(limit, (resource.RLIM_INFINITY,) * 2))
    environment = {reason: "0"} if reason.startswith("MALLOC_") else {}
    assert malloc_variables(environment, has_gpus=reason == "a GPU rank") == {}
