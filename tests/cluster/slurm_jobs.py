"""Jobs of scripts/slurm_distributed.sh on the lab's Slurm."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.hosts import Hosts

FLAGS = ["--learning-rate", "0.003", "--tensorboard", "false"]


class SlurmJob:
    """A submitted job."""

    def __init__(self, hosts: Hosts, shared: Path, options: list[str], words: list[str], **variables: str) -> None:
        """Submit scripts/slurm_distributed.sh with sbatch's options; logs and output go to the shared folder."""
        self.hosts, self.shared, self.logs = hosts, shared, shared / "logs"
        script = ["scripts/slurm_distributed.sh", *words, *FLAGS, "--log-dir", str(self.logs)]
        submit = ["sbatch", "--parsable", f"--output={shared}/%j.out", *options, *script]
        answer = hosts.run("login", submit, **variables)
        assert answer.returncode == 0, answer.stderr
        self.number = answer.stdout.strip()

    @property
    def output(self) -> str:
        """What the job has printed."""
        path = self.shared / f"{self.number}.out"
        return path.read_bytes().decode() if path.exists() else ""  # as it is, carriage returns too

    def show(self) -> dict[str, str]:
        """What Slurm says about the job."""
        line = self.hosts.run("login", ["scontrol", "show", "job", "-o", self.number]).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", line))

    def wait_for(self, what: Callable[[], object], timeout_s: float) -> None:
        """Wait until something is so, and fail with the job's output otherwise."""
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, (self.show(), self.output)
            time.sleep(0.5)

    def wait_for_state(self, *states: str, timeout_s: float) -> dict[str, str]:
        """Wait for one of Slurm's states, and return what it says then."""
        self.wait_for(lambda: self.show()["JobState"] in states, timeout_s)
        return self.show()

    def wait_for_training(self, timeout_s: float = 60) -> None:
        """Wait until a rank has logged a step of the newest start."""
        starts = self.output.count("Slurm job ")
        pattern = r"(?s)restart \d+\n(?:(?!Slurm job ).)*global batch(?:(?!Slurm job ).)*epoch +\d"
        self.wait_for(lambda: len(re.findall(pattern, self.output)) >= max(starts, 1), timeout_s)

    def release(self) -> None:
        """End the two minutes that Slurm holds a requeued job for.

        Not at once: a job started again within the second in which it was requeued has its old credential, which
        the nodes refuse ("Job credential revoked").
        """
        time.sleep(3)
        self.hosts.run("login", ["scontrol", "update", f"JobId={self.number}", "StartTime=now"])

    def weights(self, run: str) -> bytes:
        """The weights that a run has left."""
        return (self.logs / "runs" / run / "model.safetensors").read_bytes()


def processes_left(hosts: Hosts) -> list[str]:
    """Command lines on all hosts that belong neither to the hosts nor to Slurm's daemons."""
    return [line for host in ["login", *hosts.nodes] for line in hosts.processes(host).values()]
