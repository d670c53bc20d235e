"""What a container's control groups leave a process of its machine."""

from __future__ import annotations

import math
import os

import pytest
import torch

from training.base import control_groups
from training.base.control_groups import cpu_quota, limit_threads, quota_note, usable_cores
from training.data.loader import most_workers

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
