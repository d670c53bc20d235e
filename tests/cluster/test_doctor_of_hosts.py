"""The doctor on real hosts: well ones, and broken ones, each named with its host and no other blamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import distribution
from pathlib import Path

import pytest
from PIL import Image

from tests.cluster.hosts import REPO_ROOT, Hosts

pytestmark = pytest.mark.cluster

DOCTOR = [sys.executable, str(REPO_ROOT / "scripts" / "doctor.py"), "--json"]


def on_two(hosts: Hosts) -> tuple[str, ...]:
    return ("--hosts", ",".join(hosts.nodes[:2]), "--gpus-per-node", "1")


def examine(hosts: Hosts, *flags: str) -> tuple[int, list[dict[str, str]]]:
    """Run the doctor on login; return its exit code and rows."""
    result = hosts.run("login", [*DOCTOR, *flags], timeout=280)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)["rows"]


def complaints(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """What is not ok, beside memory: other work may run on this machine."""
    return [row for row in rows if row["verdict"] != "ok" and row["check"] != "memory"]


def no_key(hosts: Hosts, node: str, shared: Path, undo: ExitStack) -> tuple[str, ...]:
    hosts.run(node, ["mv", "/etc/ssh/authorized_keys", "/etc/ssh/away"])
    undo.callback(hosts.run, node, ["mv", "/etc/ssh/away", "/etc/ssh/authorized_keys"])
    return ()


def powered_off(hosts: Hosts, node: str, shared: Path, undo: ExitStack) -> tuple[str, ...]:
    hosts.fault(node, "poweroff")
    return ()


def other_version(hosts: Hosts, node: str, shared: Path, undo: ExitStack) -> tuple[str, ...]:
    own = distribution("torchvision")
    metadata = Path(str(own.locate_file(f"torchvision-{own.version}.dist-info"))) / "METADATA"
    other = shared / "METADATA"
    other.write_text(metadata.read_text().replace(f"Version: {own.version}", "Version: 0.28.1", 1))
    hosts.run(node, ["mount", "--bind", str(other), str(metadata)])
    undo.callback(hosts.run, node, ["umount", str(metadata)])
    return ()


def too_many_slots(hosts: Hosts, node: str, shared: Path, undo: ExitStack) -> tuple[str, ...]:
    hostfile = shared / "hostfile.txt"
    hostfile.write_text("".join(f"{name} slots={64 if name == node else 1}\n" for name in hosts.nodes[:2]))
    return ("--hostfile", str(hostfile))


def full_disk(hosts: Hosts, node: str, shared: Path, undo: ExitStack) -> tuple[str, ...]:
    logs = shared / "logs"
    logs.mkdir()
    hosts.run(node, ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(logs)])
    undo.callback(hosts.run, node, ["umount", str(logs)])
    hosts.run(node, ["dd", "if=/dev/zero", f"of={logs / 'full'}", "bs=64k"])
    return (*on_two(hosts), "--log-dir", str(logs))


def own_log_folder(hosts: Hosts, node: str, shared: Path, undo: ExitStack) -> tuple[str, ...]:
    hosts.run(node, ["mount", "-t", "tmpfs", "tmpfs", str(shared)])
    undo.callback(hosts.run, node, ["umount", str(shared)])
    return (*on_two(hosts), "--log-dir", str(shared / "logs"))


def tiny_shared_memory(hosts: Hosts, node: str, shared: Path, undo: ExitStack) -> tuple[str, ...]:
    hosts.run(node, ["mount", "-o", "remount,size=16m", "/dev/shm"])
    undo.callback(hosts.run, node, ["mount", "-o", "remount,size=8g", "/dev/shm"])
    return ()


def other_data(hosts: Hosts, node: str, shared: Path, undo: ExitStack) -> tuple[str, ...]:
    for number in range(8):
        path = shared / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (number, 0, 0)).save(path)
    for name in hosts.nodes[:2]:
        hosts.run(name, ["cp", "-r", str(shared / "photos"), "/tmp/photos"])
        undo.callback(hosts.run, name, ["rm", "-r", "/tmp/photos"])
    hosts.run(node, ["cp", "/tmp/photos/a/0.png", "/tmp/photos/a/one-more.png"])
    return (*on_two(hosts), "--data", "/tmp/photos")


def unknown_key(hosts: Hosts, node: str, shared: Path, undo: ExitStack) -> tuple[str, ...]:
    known = "/etc/ssh/ssh_known_hosts"
    hosts.run("login", ["cp", known, f"{known}.well"])
    hosts.run("login", ["sed", "-i", f"/^{node},/d", known])
    undo.callback(hosts.run, "login", ["mv", f"{known}.well", known])
    return ()


def no_repository(hosts: Hosts, node: str, shared: Path, undo: ExitStack) -> tuple[str, ...]:
    package = str(REPO_ROOT / "zerovision")
    hosts.run(node, ["mount", "-t", "tmpfs", "tmpfs", package])
    undo.callback(hosts.run, node, ["umount", package], cwd=Path("/"))
    return ()


# How it is broken, which of the nodes, the row that is wrong, and a part of what it says.
BROKEN: list[tuple[Callable[..., tuple[str, ...]], int, str, str]] = [
    (powered_off, 1, "hosts", "timed out"),
    (no_key, 1, "hosts", "password"),
    (other_version, 1, "versions", "torchvision 0.28.1"),
    (too_many_slots, 1, "GPUs", "64 CPU ranks"),
    (full_disk, 1, "log folder", "No space left on device"),
    (own_log_folder, 1, "shared logs", "what node01 writes in "),
    (tiny_shared_memory, 1, "/dev/shm", "16.8 MB"),
    (other_data, 1, "same data", "2 classes"),
    (unknown_key, 1, "hosts", "host key"),
    (no_repository, 1, "hosts", "repository"),
]


def test_well_hosts_are_found_well(hosts: Hosts) -> None:
    flags = ("--hosts", ",".join(hosts.nodes), "--gpus-per-node", "1", "--data", "digits")
    code, rows = examine(hosts, *flags)
    assert (code, complaints(rows)) == (0, [])
    checks = {row["check"] for row in rows}
    assert {"hosts", "versions", "same data", "shared logs", "data", "all-reduce"} <= checks
    assert "4 ranks, gloo over eth0" in next(row["found"] for row in rows if row["check"] == "all-reduce")


@pytest.mark.parametrize(
    ("breaks", "number", "check", "said"), BROKEN, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_is_broken_is_named_with_its_host(
    hosts: Hosts, shared: Path, breaks: Callable[..., tuple[str, ...]], number: int, check: str, said: str
) -> None:
    node = hosts.nodes[number]
    with ExitStack() as undo:
        code, rows = examine(hosts, *(breaks(hosts, node, shared, undo) or on_two(hosts)))
    wrong = [row for row in rows if row["verdict"] == "wrong"]
    assert code == 1
    assert [(row["check"], row["host"]) for row in wrong] == [(check, node)]
    assert said in wrong[0]["found"]
    assert wrong[0]["cure"]
    assert {row["host"] for row in complaints(rows)} == {node}


@pytest.mark.parametrize("number", [0, 1])
def test_of_hosts_that_cannot_connect_the_guilty_one_is_named(hosts: Hosts, number: int) -> None:
    hosts.fault(hosts.nodes[number], "firewall", "1024-65535")
    code, rows = examine(hosts, "--hosts", ",".join(hosts.nodes[:3]), "--gpus-per-node", "1")
    assert code == 1
    assert [(row["check"], row["host"]) for row in complaints(rows)] == [("connections", hosts.nodes[number])]
    assert f"cannot connect to {hosts.nodes[number]}" in next(row["found"] for row in rows if row["verdict"] == "wrong")
