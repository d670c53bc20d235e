"""The lab itself: hosts that are apart, and faults that do what they say."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts

pytestmark = pytest.mark.cluster


def ping(hosts: Hosts, target: str) -> bool:
    """Whether a host answers over TCP (its sshd) within a second."""
    script = f"import socket; socket.create_connection(({target!r}, 22), timeout=1)"
    return hosts.run("login", ["python3", "-c", script]).returncode == 0


def test_hosts_have_their_own_names_processes_and_tmp(hosts: Hosts, shared: Path) -> None:
    first, second = hosts.nodes[:2]
    assert [hosts.run(host, ["hostname"]).stdout for host in hosts.nodes] == [f"{host}\n" for host in hosts.nodes]
    assert hosts.run("login", ["ssh", first, "hostname"]).stdout == f"{first}\n"
    hosts.run(first, ["touch", "/tmp/mine", str(shared / "ours")])
    assert (shared / "ours").exists()
    assert hosts.run(second, ["ls", "/tmp/mine", str(shared / "ours")]).stdout == f"{shared / 'ours'}\n"
    assert not Path("/tmp/mine").exists()
    running = hosts.start(first, ["sleep", "1000.1"])
    time.sleep(0.3)
    assert len(hosts.processes(first, "1000.1")) == 1
    assert hosts.processes(second, "1000.1") == {}
    hosts.recover()
    running.kill()
    assert running.wait(10)


@pytest.mark.parametrize("kind", ["unplug", "blackhole", "crash", "poweroff"])
def test_a_broken_host_does_not_answer_and_a_repaired_one_does(hosts: Hosts, kind: str) -> None:
    node = hosts.nodes[0]
    assert ping(hosts, node)
    hosts.fault(node, kind)
    assert not ping(hosts, node)
    hosts.recover()
    assert ping(hosts, node)


def test_a_delay_delays(hosts: Hosts) -> None:
    node = hosts.nodes[0]
    hosts.fault(node, "delay", "100")
    time.sleep(0.5)
    begin = time.monotonic()
    assert ping(hosts, node)
    assert time.monotonic() - begin > 0.2


def test_slurm_runs_on_all_nodes_and_again_on_a_booted_one(slurm: Hosts) -> None:
    """All but the last have pretended GPUs; that one is a partition of its own."""
    *gpu_nodes, cpu_node = slurm.nodes
    srun = ["timeout", "60", "srun", f"--nodes={len(gpu_nodes)}", "--gpus-per-node=8", "hostname"]
    assert sorted(slurm.run("login", srun, timeout=90).stdout.split()) == gpu_nodes
    alone = ["timeout", "60", "srun", "--partition=cpu", "hostname"]
    assert slurm.run("login", alone, timeout=90).stdout.split() == [cpu_node]
    slurm.fault(gpu_nodes[0], "poweroff")
    slurm.boot(gpu_nodes[0])
    assert sorted(slurm.run("login", srun, timeout=90).stdout.split()) == gpu_nodes
