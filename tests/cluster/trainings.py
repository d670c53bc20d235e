"""Trainings on the hosts of the lab: started as a user does, watched from outside."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.cluster.hosts import REPO_ROOT, Hosts

AGENT = "launch/agent.py"
ENTRY = "train_distributed.py"
LAUNCH = "launch/launch.py"
RUN = "run"
POLL_SECONDS = 0.05
LEAVE_SECONDS = 20.0


class Training:
    """One `launch_multi_node.sh` on the login host, with its output in a file."""

    def __init__(self, hosts: Hosts, folder: Path, words: list[str], nodes: int, slots: int, **changes: str) -> None:
        """Start it with the hostfile of the first nodes; `words` are all that the launcher gets."""
        self.hosts = hosts
        self.folder = folder
        self.output = folder / "output.txt"
        hostfile = folder / "hostfile.txt"
        hostfile.write_text("".join(f"{name} slots={slots}\n" for name in hosts.nodes[:nodes]))
        command = ["bash", str(REPO_ROOT / "scripts/launch_multi_node.sh"), *words]
        self.process = hosts.start(
            hosts.login, command, cwd=folder, output=self.output, HOSTFILE=str(hostfile), **changes
        )

    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait_for_text(self, pattern: str, timeout_s: float = 120.0) -> float:
        """Wait until a line of the output matches; return the wall clock then."""
        return self._wait(lambda: re.search(pattern, self.text()) is not None, f"no {pattern!r}", timeout_s)

    def wait_for_step(self, step: int, after: float = 0.0, timeout_s: float = 120.0) -> float:
        """Wait for an optimizer step that was logged later than `after`; return when it was, by the wall clock."""

        def is_there() -> bool:
            return any(entry["step"] >= step and entry["time"] > after for entry in self.steps())

        self._wait(is_there, f"no step {step}", timeout_s)
        return min(entry["time"] for entry in self.steps() if entry["step"] >= step and entry["time"] > after)

    def steps(self) -> list[dict[str, Any]]:
        """The optimizer steps logged so far."""
        return [entry for entry in read_metrics(self.folder) if entry["kind"] == "step"]

    def end(self, timeout_s: float = 240.0) -> int:
        """Wait for the end; return the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end:\n{self.text()}") from None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the launch on the login host."""
        self.hosts.signal(self.hosts.login, number, *self.hosts.processes(self.hosts.login, LAUNCH))

    def assert_nothing_is_left(self, *nodes: str) -> None:
        """Check that no process of the training runs on the nodes (all but those that are down), or soon none."""
        wanted = nodes or tuple(self.hosts.nodes)
        deadline = time.monotonic() + LEAVE_SECONDS
        while (left := {node: self.hosts.processes(node, ".py") for node in wanted}) and any(left.values()):
            assert time.monotonic() < deadline, left
            time.sleep(POLL_SECONDS)

    def weights(self) -> bytes:
        """The weights of the best epoch, as they lie on the disk."""
        return (self.folder / f"logs/runs/{RUN}/model.safetensors").read_bytes()

    def _wait(self, is_there: Any, missing: str, timeout_s: float) -> float:
        deadline = time.monotonic() + timeout_s
        while not is_there():
            assert self.process.poll() is None or is_there(), f"{missing}: it has ended:\n{self.text()}"
            assert time.monotonic() < deadline, f"{missing}:\n{self.text()}"
            time.sleep(POLL_SECONDS)
        return time.time()


def ranks(hosts: Hosts, node: str) -> list[int]:
    """The processes of the ranks on a node, without their launcher and agent."""
    rows = [line.split(None, 1) for line in hosts.run(node, ["ps", "-eo", "pid=,comm="]).stdout.splitlines()]
    return [int(pid) for pid, name in rows if name.startswith("rank ")]


def agent(hosts: Hosts, node: str) -> int:
    """The agent on a node, without the process that guards its ranks."""
    return min(hosts.processes(node, AGENT))


def assert_auto_was_planned(run: Path, text: str, ranks: int, global_batch: int) -> list[str]:
    """Check strategy and batch size of a run that was given `auto` for both; return them as launchers' words."""
    config, found = (json.loads((run / name).read_text()) for name in ("config.json", "batch_size.json"))
    assert found["global_batch"] == global_batch
    assert found["ranks"] == ranks
    size = found["batch_size"]
    assert size in found["possible"]
    assert config["strategy"] in ("ddp", "fsdp_stage2", "fsdp_stage3")
    assert f"strategy auto: {config['strategy']}" in text
    assert f"--batch-size auto is {size} per CPU rank" in text
    return [config["strategy"], str(size)]


def train_on_login(hosts: Hosts, folder: Path, words: list[str]) -> Path:
    """Train on the login host alone, through launch_distributed.sh; return the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["bash", str(REPO_ROOT / "scripts/launch_distributed.sh"), *words]
    result = hosts.run("login", command, timeout=300, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "logs/runs" / RUN


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of the run's metrics.jsonl so far."""
    path = folder / f"logs/runs/{RUN}/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def flags(folder: Path, *more: str) -> list[str]:
    """The flags of every training here: its logs lie in the folder, and it can go on after any step."""
    logs = ["--log-dir", str(folder / "logs"), "--run-name", RUN, "--resume", "auto", "--tensorboard", "false"]
    return [*logs, "--log-every-steps", "1", "--save-every-steps", "3", *more]
