"""The doctor's probe of one machine: it answers questions there, and the doctor starts it and asks here.

Question and answer are a JSON object on one line, of the probe's standard input and output. Each answer begins with the
record separator of RFC 7464, which distinguishes it from a greeting that a remote shell prints first.
"""

from __future__ import annotations

import atexit
import json
import os
import pkgutil
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zerovision.launch.hosts import Command
from zerovision.training.base.atomic_write import leave_mark, sees_mark
from zerovision.training.base.errors import UserError
from zerovision.training.base.places import ENTRIES, REPO_ROOT

RECORD_SEPARATOR = "\x1e"
# Question -> the function that answers it; its module is imported when the question comes.
ANSWERS = {
    "machine": "zerovision.planning.doctor.machine:machine_facts",
    "leave_mark": "zerovision.planning.doctor.probe:write_mark",
    "sees_mark": "zerovision.planning.doctor.probe:look_for_mark",
    "open_port": "zerovision.planning.doctor.examination:open_port",
    "try_paths": "zerovision.planning.doctor.examination:try_paths",
    "network": "zerovision.planning.doctor.network:measure_network",
}
PROBE = [sys.executable, str(ENTRIES / "doctor.py"), "--probe"]
LEAVE_SECONDS = 2.0

Answer = dict[str, Any]


def write_mark(folder: str) -> Answer:
    """Write a file into a folder and return its path as `mark`, see `leave_mark`; it goes with this process."""
    mark = leave_mark(Path(folder))
    atexit.register(mark.unlink, missing_ok=True)
    return {"mark": str(mark)}


def look_for_mark(mark: str, seconds: float) -> Answer:
    """Return `is_seen`, see `sees_mark`."""
    return {"is_seen": sees_mark(Path(mark), seconds)}


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
            answer = pkgutil.resolve_name(ANSWERS[question["ask"]])(**question["with"])
        except UserError as error:
            answer = {"problem": str(error)}
        except Exception as error:
            answer = {"problem": f"{type(error).__name__}: {error}"}
        output.write(f"{RECORD_SEPARATOR}{json.dumps(answer | {'reached_by': reached_by})}\n")
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
    """The probe of one machine, started now by a command; a context manager that ends it."""

    def __init__(self, host: str, command: Command) -> None:
        self.host = host
        arguments, environment = command
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

    def ask(self, question: str, seconds: float, /, **request: Any) -> Answer:
        """Return the answer: what the function returns or its `problem`, and `reached_by`, see `serve`.

        Args:
            question: a key of `ANSWERS`.
            seconds: time limit.
            request: arguments of the function that answers.

        Raises:
            Unreachable: if no answer comes in time, or the connection ends.
        """
        try:
            self._stdin.write(json.dumps({"ask": question, "with": request}).encode() + b"\n")
            self._stdin.flush()
        except OSError:
            raise self._why_it_ended() from None
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

    def _why_it_ended(self) -> Unreachable:
        try:
            code = self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            code = 0
        self._stderr.seek(0)
        return explain(self.host, code, self._stderr.read().decode(errors="replace"))


def ask_all(
    probes: Iterable[Probe], ask: Callable[[Probe], Answer]
) -> tuple[dict[str, Answer], dict[str, Unreachable]]:
    """Ask all machines at once; return the answers, and why others could not be reached, both by host."""
    answers, lost, asked = {}, {}, list(probes)
    with ThreadPoolExecutor(max_workers=max(len(asked), 1)) as pool:
        for host, answer in [(probe.host, pool.submit(ask, probe)) for probe in asked]:
            try:
                answers[host] = answer.result()
            except Unreachable as error:
                lost[host] = error
    return answers, lost


# Text on stderr (OpenSSH's messages) -> what was found, and the cure; the first that matches counts.
SSH_COMPLAINTS = {
    "IDENTIFICATION HAS CHANGED": ("its host key is another one than before", "if that is right: ssh-keygen -R {host}"),
    "Host key verification failed": ("its host key is unknown to ssh", "ssh {host} once and accept the key"),
    "Could not resolve hostname": ("no such host name", "correct the name, or add it to the DNS or to /etc/hosts"),
    "Permission denied": ("ssh wants a password", "ssh-copy-id {host} (the key must be one that ssh takes unasked)"),
    "Too many authentication failures": ("ssh offers too many keys", "name one key in ~/.ssh/config: IdentityFile"),
    "Connection refused": ("no ssh server answers (connection refused)", "start sshd on {host}, or correct its port"),
    "timed out": ("no answer (timed out): the host is down, or a firewall drops", "switch {host} on; open port 22"),
    "No route to host": ("no route to the host: it is down, or in another network", "switch {host} on"),
    "Network is unreachable": ("its network cannot be reached from here", "check the routes of this machine"),
    "can't open file": ("the repository is not there at the same path", "put {root} on {host}, or share its folder"),
    "closed by": ("ssh server closed the connection", "look into the log of sshd on {host} (MaxStartups, AllowUsers)"),
    "reset by": ("the connection was reset", "look into the log of sshd on {host} (MaxStartups, a firewall)"),
}
NOT_FOUND_CODES = (126, 127)  # of a shell: cannot be run, not found


def explain(host: str, code: int, complaint: str) -> Unreachable:
    """Return why a remote probe ended, from its exit code and its stderr."""
    for sign, (found, cure) in SSH_COMPLAINTS.items():
        if sign in complaint:
            return Unreachable(found, cure.format(host=host, root=REPO_ROOT))
    if code in NOT_FOUND_CODES:
        return Unreachable(
            f"{sys.executable} is not there", f"make setup in {REPO_ROOT} on {host}, or share the folder"
        )
    last = (complaint.strip() or "nothing on stderr").splitlines()[-1].strip()
    return Unreachable(f"the probe ended with code {code}: {last[:200]}", f"try: ssh {host} {' '.join(PROBE)}")
