"""What a container's control groups leave a process of its machine."""

from __future__ import annotations

import math
import os

import pytest
import torch

from zerovision.training.base import control_groups
from zerovision.training.base.control_groups import cpu_quota, limit_threads, quota_note, usable_cores, usable_memory
from zerovision.training.data import DataOptions
from zerovision.training.data.loader import most_workers
from zerovision.training.data.reading import cache

NEW, OLD = "sys/fs/cgroup", "sys/fs/cgroup/cpu"


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
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
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
    files = {"proc/meminfo": "MemTotal: 8000 kB\nMemAvailable: 7000 kB\n", "proc/self/cgroup": groups, **files}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_memory(tmp_path) == 1024 * kib
    monkeypatch.setattr(cache, "usable_memory", lambda: usable_memory(tmp_path))
    assert cache._location(DataOptions(cache="ram"))[1] == 256 * kib


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
