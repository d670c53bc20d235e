"""Starts the doctor's probe on machines, asks it, and finds out why a machine cannot be reached."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launch.cluster.remote_shell import Command
from planning.doctor.probe import RECORD_SEPARATOR, slowdown
from training.config import REPO_ROOT

START_SECONDS = 20.0  # longer than ssh takes to give up connecting
MOST_PATIENCE = 8.0
SSH_BANNER_SECONDS = 3.0
CLOCK_QUESTIONS = 3
PROBE = [sys.executable, str(REPO_ROOT / "scripts" / "doctor.py"), "--probe"]
LEAVE_SECONDS = 2.0


def local_command(host: str, arguments: list[str]) -> Command:
    """Return the command that runs `arguments` on this machine, as `ssh_command` does on another one."""
    return arguments, None


class Unreachable(Exception):
    """A machine does not answer: the message says what was found, `cure` what to do."""

    def __init__(self, found: str, cure: str) -> None:
        super().__init__(found)
        self.cure = cure


class Probe:
    """The probe of one machine, started now; a context manager that ends it.

    Attributes:
        host: the machine.
        patience: factor on all time limits, at least 1: how loaded this machine and the other one are.
    """

    def __init__(self, host: str, command: Command) -> None:
        self.host = host
        self.patience = min(slowdown(), MOST_PATIENCE)
        arguments, environment = command
        self._is_ssh = arguments[0] == "ssh"
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with the context
        self._process = subprocess.Popen(
            arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr
        )
        assert self._process.stdin
        assert self._process.stdout
        self._stdin, self._stdout, self._received = self._process.stdin, self._process.stdout, b""

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *error: object) -> None:
        with self._stderr, self._stdout:
            try:
                self._stdin.close()
                self._process.wait(LEAVE_SECONDS)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()

    def ask(self, question: str, seconds: float, /, **request: Any) -> dict[str, Any]:
        """Return the answer.

        Args:
            question: a key of `probe.ANSWERS`.
            seconds: time limit on an idle machine.
            request: arguments of the function that answers.

        Raises:
            Unreachable: if no answer comes in time, or the connection ends.
        """
        try:
            self._stdin.write(json.dumps({"ask": question, "with": request}).encode() + b"\n")
            self._stdin.flush()
        except OSError:
            raise self._why_it_ended() from None
        seconds *= self.patience
        deadline = time.monotonic() + seconds
        while True:
            while b"\n" not in self._received:
                if not select.select([self._stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
                    self._process.kill()  # or __exit__ would wait for it
                    raise Unreachable(f"no answer within {seconds:.0f} s", f"log in to {self.host} and look what hangs")
                if not (received := os.read(self._stdout.fileno(), 65536)):
                    raise self._why_it_ended()
                self._received += received
            line, _, self._received = self._received.partition(b"\n")
            if line.startswith(RECORD_SEPARATOR.encode()):
                return json.loads(line[1:])

    def clock_offset(self) -> float:
        """Return how many seconds the machine's clock is ahead of ours, and adapt `patience` to its load.

        The answer is taken to lie in the middle between question and receipt, in the quickest of several rounds
        (Cristian 1989, Probabilistic clock synchronization, Distributed Computing 3).
        """
        rounds = []
        for number in range(CLOCK_QUESTIONS):
            asked = time.time()
            answer = self.ask("time", START_SECONDS)
            received = time.time()
            rounds.append((received - asked, answer["time"] - (asked + received) / 2))
            if number == 0:
                self.patience = max(self.patience, min(answer["slowdown"], MOST_PATIENCE))
        return min(rounds)[1]

    def _why_it_ended(self) -> Unreachable:
        try:
            code = self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            code = 0
        self._stderr.seek(0)
        complaint = self._stderr.read().decode(errors="replace")
        if self._is_ssh and "timed out" in complaint and (stuck := _why_ssh_is_stuck(self.host)):
            return stuck
        return explain(self.host, code, complaint)


def ask_all(
    probes: Sequence[Probe], ask: Callable[[Probe], dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, Unreachable]]:
    """Ask all machines at once; return the answers, and why others could not be reached, both by host."""
    answers, lost = {}, {}
    with ThreadPoolExecutor(max_workers=max(len(probes), 1)) as pool:
        for host, answer in [(probe.host, pool.submit(ask, probe)) for probe in probes]:
            try:
                answers[host] = answer.result()
            except Unreachable as error:
                lost[host] = error
    return answers, lost


def _why_ssh_is_stuck(host: str) -> Unreachable | None:
    """Return why ssh times out at a host whose port connects; None if it does not, or ssh uses a proxy."""
    configuration = subprocess.run(["ssh", "-G", "--", host], capture_output=True, text=True)
    settings = dict(line.split(" ", 1) for line in configuration.stdout.splitlines() if " " in line)
    if "hostname" not in settings or "proxycommand" in settings or "proxyjump" in settings:
        return None
    return stuck_at(host, settings["hostname"], int(settings.get("port", 22)))


def stuck_at(host: str, address: str, port: int) -> Unreachable | None:
    """Return why ssh times out at a port that connects; None if it does not connect.

    The server's first line fits in a small packet, the exchange of keys does not.
    """
    try:
        connection = socket.create_connection((address, port), timeout=SSH_BANNER_SECONDS)
    except OSError:
        return None
    with connection:
        try:
            has_greeted = bool(connection.recv(64))
        except OSError:
            has_greeted = False
    if not has_greeted:
        found = f"port {port} connects, but the ssh server there says nothing: it hangs, or the machine is overloaded"
        return Unreachable(found, f"look at {host} from its console")
    return Unreachable(
        f"port {port} answers, but ssh gets no further: packets of full size are lost on the way",
        f"a smaller MTU on the way to {host}: compare ip link there and here, ping -M do -s 1472 {host}",
    )


# Text on stderr (OpenSSH's messages) -> what was found, and the cure; the first that matches counts.
SSH_COMPLAINTS = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "its host key is another one than ssh remembers",
        "if the machine was set up anew: ssh-keygen -R {host}, then ssh {host} once",
    ),
    "Host key verification failed": ("its host key is unknown to ssh", "ssh {host} once and accept the key"),
    "Could not resolve hostname": ("no such host name", "correct the name, or add it to the DNS or to /etc/hosts"),
    "Permission denied": ("ssh wants a password", "ssh-copy-id {host} (the key must be one that ssh takes unasked)"),
    "Too many authentication failures": ("ssh offers too many keys", "name one key in ~/.ssh/config: IdentityFile"),
    "Connection refused": ("no ssh server answers (connection refused)", "start sshd on {host}, or correct its port"),
    "timed out": ("no answer (timed out): the host is down, or a firewall drops", "switch {host} on; open port 22"),
    "No route to host": (
        "no route to the host: it is down, or in another network",
        "switch {host} on; check its network",
    ),
    "Network is unreachable": ("its network cannot be reached from here", "check the routes of this machine"),
    "can't open file": ("the repository is not there at the same path", "put {root} on {host}, or share its folder"),
    "closed by": (
        "ssh server closed the connection",
        "look into the log of sshd on {host} (MaxStartups, AllowUsers, hosts.deny)",
    ),
    "reset by": ("the connection was reset", "look into the log of sshd on {host} (MaxStartups, a firewall)"),
}
NOT_FOUND_CODES = (126, 127)  # of a shell: cannot be run, not found


def explain(host: str, code: int, complaint: str) -> Unreachable:
    """Return why a remote probe ended, from its exit code and its stderr."""
    for sign, (found, cure) in SSH_COMPLAINTS.items():
        if sign in complaint:
            return Unreachable(found, cure.format(host=host, root=REPO_ROOT))
    if code in NOT_FOUND_CODES:
        cure = f"make setup in {REPO_ROOT} on {host}, or share the folder"
        return Unreachable(f"{sys.executable} is not there", cure)
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    last = lines[-1] if lines else "nothing on stderr"
    return Unreachable(f"the probe ended with code {code}: {last[:200]}", f"try: ssh {host} {' '.join(PROBE)}")
