"""Reaches machines: starts the doctor's probe there, asks it, and tells apart why one cannot be reached."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from planning.doctor.probe import RECORD_SEPARATOR
from scripts.cluster.remote_shell import srun_command, ssh_command
from training.config import REPO_ROOT

START_SECONDS = 20.0  # longer than ssh takes to give up connecting
CLOCK_QUESTIONS = 3
PROBE = [sys.executable, str(REPO_ROOT / "scripts" / "doctor.py"), "--probe"]
LEAVE_SECONDS = 2.0


# A command, and its environment; None for our own.
Command = tuple[list[str], dict[str, str] | None]


def over_ssh(host: str) -> Command:
    """Return what starts the probe on a host over ssh."""
    return ssh_command(host, PROBE), None


def over_srun(host: str) -> Command:
    """Return what starts the probe on a host of this Slurm job."""
    return srun_command([host], PROBE, is_beside=True)


def here(host: str) -> Command:
    """Return what starts the probe on this machine."""
    return PROBE, None


class Unreachable(Exception):
    """No answer: the message says what was found, `cure` what to do."""

    def __init__(self, found: str, cure: str) -> None:
        super().__init__(found)
        self.cure = cure


class Probe:
    """The probe of one machine, started now; a context, which ends it."""

    def __init__(self, host: str, command: Command) -> None:
        self.host = host
        words, environment = command
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  closed with the context
        self._process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints
        )
        self._received = b""

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        with self._complaints, self._process.stdout:
            try:
                self._process.stdin.close()
                self._process.wait(LEAVE_SECONDS)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()

    def ask(self, question: str, seconds: float, /, **request: Any) -> dict[str, Any]:
        """Return the answer.

        Raises:
            Unreachable: no answer within `seconds`, or the connection ended.
        """
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"ask": question, "with": request}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._why_it_ended() from None
        deadline = time.monotonic() + seconds
        while True:
            line = self._line(deadline, seconds)
            if line.startswith(RECORD_SEPARATOR):
                return json.loads(line[1:])

    def clock_offset(self) -> float:
        """Return by how many seconds the machine's clock is ahead of ours.

        The answer is taken to lie in the middle between question and receipt, of the quickest of some rounds
        (Cristian 1989, Probabilistic clock synchronization, Distributed Computing 3).
        """
        rounds = []
        for _ in range(CLOCK_QUESTIONS):
            asked = time.time()
            told = self.ask("time", START_SECONDS)["time"]
            received = time.time()
            rounds.append((received - asked, told - (asked + received) / 2))
        return min(rounds)[1]

    def _line(self, deadline: float, seconds: float) -> str:
        assert self._process.stdout
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                self._process.kill()  # or its end would have to be waited for
                raise Unreachable(f"no answer within {seconds:.0f} s", f"log in to {self.host} and look what hangs")
            received = os.read(self._process.stdout.fileno(), 65536)
            if not received:
                raise self._why_it_ended()
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace")

    def _why_it_ended(self) -> Unreachable:
        try:
            code = self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            code = 0
        self._complaints.seek(0)
        return explain(self.host, code, self._complaints.read().decode(errors="replace"))


# What ssh says on stderr (OpenSSH's messages) -> what was found, and the cure; {host} is filled in. The first line that
# occurs holds.
SSH_COMPLAINTS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is another one than ssh remembers",
        "if the machine was set up anew: ssh-keygen -R {host}, then ssh {host} once",
    ),
    ("Host key verification failed", "its host key is unknown to ssh", "ssh {host} once and accept the key"),
    (
        "Could not resolve hostname",
        "no such host name",
        "correct the name, or add it to the DNS or to /etc/hosts",
    ),
    ("Permission denied", "ssh wants a password", "ssh-copy-id {host} (the key must be one that ssh takes unasked)"),
    ("Too many authentication failures", "ssh offers too many keys", "name one key in ~/.ssh/config: IdentityFile"),
    ("Connection refused", "no ssh server answers (connection refused)", "start sshd on {host}, or correct its port"),
    ("timed out", "no answer (timed out): the host is down, or a firewall drops", "switch {host} on; open port 22"),
    (
        "No route to host",
        "no route to the host: it is down, or in another network",
        "switch {host} on; check its network",
    ),
    ("Network is unreachable", "its network cannot be reached from here", "check the routes of this machine"),
    ("can't open file", "the repository is not there at the same path", "put {root} on {host}, or share its folder"),
    (
        "closed by",
        "ssh server closed the connection",
        "look into the log of sshd on {host} (MaxStartups, AllowUsers, hosts.deny)",
    ),
    ("reset by", "the connection was reset", "look into the log of sshd on {host} (MaxStartups, a firewall)"),
)
NOT_FOUND_CODES = (126, 127)  # of a shell: cannot be run, not found


def explain(host: str, code: int, complaint: str) -> Unreachable:
    """Tell why a remote probe ended, from its exit code and what stood on stderr."""
    for sign, found, cure in SSH_COMPLAINTS:
        if sign in complaint:
            return Unreachable(found, cure.format(host=host, root=REPO_ROOT))
    if code in NOT_FOUND_CODES:
        return Unreachable(
            f"{sys.executable} is not there", f"make setup in {REPO_ROOT} on {host}, or share the folder"
        )
    lines = [line for line in complaint.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "nothing on stderr"
    return Unreachable(f"the probe ended with code {code}: {last[:200]}", f"try: ssh {host} {' '.join(PROBE)}")


def ask_all(
    probes: Sequence[Probe], ask: Callable[[Probe], dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, Unreachable]]:
    """Ask all machines at once; return the answers, and who could not be reached, both by host."""

    def attempt(probe: Probe) -> dict[str, Any] | Unreachable:
        try:
            return ask(probe)
        except Unreachable as error:
            return error

    with ThreadPoolExecutor(max_workers=max(len(probes), 1)) as pool:
        results = dict(zip((probe.host for probe in probes), pool.map(attempt, probes), strict=True))
    answers = {host: result for host, result in results.items() if not isinstance(result, Unreachable)}
    return answers, {host: result for host, result in results.items() if isinstance(result, Unreachable)}
