"""The doctor's probe of one machine: it answers questions there, and the doctor starts it and asks here.

Question and answer are a JSON object on one line, of the probe's standard input and output. Each answer begins with the
record separator of RFC 7464, which distinguishes it from a greeting that a remote shell prints first.
"""

from __future__ import annotations

import json
import os
import pkgutil
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launch.cluster.remote_shell import Command
from training.checkpoint.atomic_write import process_start_ticks
from training.config import REPO_ROOT
from training.errors import UserError
from training.observe.control_groups import usable_cores
from training.observe.shared_folder import leave_mark, sees_mark

RECORD_SEPARATOR = "\x1e"
LEAST_COMPUTING_SECONDS = 0.1  # starting Python and importing the modules; less is no measure

# Question -> the function in planning.doctor that answers it. Modules are imported on demand: the first answer
# contains the time and must come at once.
ANSWERS = {
    "time": "probe:time_and_load",
    "host_facts": "host_facts:collect_host_facts",
    "dataset": "workload:measure_dataset",
    "dataset_fingerprint": "workload:dataset_fingerprint",
    "model": "workload:measure_model",
    "network": "network:measure_network",
    "open_ports": "tcp_paths:open_ports",
    "try_paths": "tcp_paths:try_paths",
    "leave_mark": "probe:write_mark",
    "sees_mark": "probe:look_for_mark",
    "remove_mark": "probe:remove_mark",
}
START_SECONDS = 20.0  # longer than ssh takes to give up connecting
MOST_PATIENCE = 8.0
SSH_BANNER_SECONDS = 3.0
CLOCK_QUESTIONS = 3
PROBE = [sys.executable, str(REPO_ROOT / "scripts" / "doctor.py"), "--probe"]
LEAVE_SECONDS = 2.0


def time_and_load() -> dict[str, float]:
    """Return the machine's `time` and the `slowdown` of processes there."""
    return {"time": time.time(), "slowdown": slowdown()}


def write_mark(folder: str) -> dict[str, str]:
    """Write a file into a folder and return its path as `mark`, see `leave_mark`."""
    return {"mark": str(leave_mark(Path(folder)))}


def look_for_mark(mark: str, seconds: float) -> dict[str, bool]:
    """Return `is_seen`, see `sees_mark`."""
    return {"is_seen": sees_mark(Path(mark), seconds)}


def remove_mark(mark: str) -> dict[str, Any]:
    """Remove a mark."""
    Path(mark).unlink(missing_ok=True)
    return {}


def slowdown() -> float:
    """Return how many times longer than on an idle machine a process takes here, at least 1.

    That is the larger of the age of this process per second of its CPU time, and of the load average of the last
    minute per core. This process is idle while it waits for a question, so only the first answer is a measure.
    """
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(process_start_ticks("self")) / os.sysconf("SC_CLK_TCK")
    load = os.getloadavg()[0] / usable_cores()
    return max(1.0, age / max(time.process_time(), LEAST_COMPUTING_SECONDS), load)


def serve(reached_by: str) -> None:
    """Answer each line of standard input until its end.

    Args:
        reached_by: this machine's address on the way from the doctor, '' if unknown.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps what libraries print out of the answers
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = pkgutil.resolve_name(f"planning.doctor.{ANSWERS[question['ask']]}")(**question["with"])
            answer = {"reached_by": reached_by, **answer}
        except UserError as error:
            answer = {"problem": str(error)}
        except Exception as error:
            answer = {"problem": f"{type(error).__name__}: {error}"}
        output.write(f"{RECORD_SEPARATOR}{json.dumps(answer)}\n")
        output.flush()


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
