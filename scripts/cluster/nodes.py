"""The launch's side of its nodes: connects to an agent on each through a remote shell, and hears what they say.

A remote shell is a function from hosts to the commands that start agents on them:

    ssh     one process per host; messages go over its stdin and stdout
    pdsh    one process for all; each agent connects back to us, because pdsh passes no stdin on
    srun    the same, inside a Slurm allocation
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.cluster.agent import BEAT_SECONDS, CONNECT_SECONDS, LOST_SECONDS, TOKEN_VARIABLE
from scripts.cluster.channel import Channel, Message
from scripts.cluster.remote_shell import pdsh_command, srun_command, ssh_command
from training.config import REPO_ROOT
from training.interface import own_addresses

LINES_KEPT = 10
POLL_SECONDS = 0.05
LEAVE_SECONDS = 1.0
LAST_WORDS_SECONDS = 1.0
# A remote shell that ends so may succeed a little later: the machine still boots, or its network is away for a moment.
PASSING = (
    "refused",
    "timed out",
    "No route",
    "unreachable",
    "closed by",
    "reset by",
    "Connection closed",
    "banner",
    "is lost",
)
PDSH_ENDED = "ssh exited with exit code"
AGENT = ["-u", str(REPO_ROOT / "scripts/cluster/agent.py")]


@dataclass
class Node:
    """An agent on a host, and what it has said."""

    host: str
    channel: Channel
    heard: float = field(default_factory=time.monotonic)
    is_closed: bool = False
    said: dict[str, Message] = field(default_factory=dict)  # the last message of each kind
    end_by: float = math.inf  # when it is given up, on the monotonic clock

    def is_working(self) -> bool:
        """Return whether its ranks may still run, as far as anybody can tell."""
        return "ended" not in self.said and not self.lost() and time.monotonic() < self.end_by

    def lost(self) -> str:
        """Return why the agent counts as lost, '' while it does not."""
        if "ended" in self.said:
            return ""
        if self.is_closed:
            return f"{self.host} is lost: its connection ended"
        silent_s = time.monotonic() - self.heard
        return f"{self.host} is lost: no sign of life for {silent_s:.0f} s" if silent_s > LOST_SECONDS else ""

    @property
    def was_told_to_end(self) -> bool:
        """Whether its ranks were ended because of what happened elsewhere."""
        return self.end_by < math.inf

    def end(self, within_s: float) -> None:
        """Tell it, once, to end its ranks at once; it is given up after so many seconds."""
        if not self.was_told_to_end:
            self.end_by = time.monotonic() + within_s
            self.tell("end")

    def tell(self, what: str, **values: object) -> None:
        """Send a message."""
        if not self.channel.send({"do": what, **values}):
            self.is_closed = True


@dataclass
class Shell:
    """A running remote shell, and the last lines that it wrote on stderr."""

    process: subprocess.Popen
    hosts: list[str]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))
    all_read: threading.Event = field(default_factory=threading.Event)

    def end(self, number: int, deadline: float) -> None:
        """Send it a signal (0: none) if it still runs, and give it until the deadline to leave."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if number and self.process.poll() is None:
                os.killpg(self.process.pid, number)
            self.process.wait(max(0.0, deadline - time.monotonic()))

    def has_failed(self, host: str) -> bool:
        """Return whether there will be no agent on a host: the process has ended, or pdsh's part for the host has."""
        if self.process.poll() is not None:
            # Its last words say why. What it left running may hold stderr open: that is waited for once.
            self.all_read.wait(LAST_WORDS_SECONDS)
            self.all_read.set()
            return True
        return any(f"{host}: {PDSH_ENDED}" in line for line in list(self.lines))

    def reason(self, host: str) -> str:
        """Say why no agent speaks on a host."""
        lines = [line for line in list(self.lines) if PDSH_ENDED not in line]
        return ([line for line in lines if host in line] or lines or ["no answer"])[-1]


class Nodes:
    """The agents of one start."""

    def __init__(self, remote_shell: str) -> None:
        """Prepare to start agents through 'ssh', 'pdsh' or 'srun'."""
        self.found: dict[str, Node] = {}
        self._open_shells = SHELLS[remote_shell]
        self._shells: list[Shell] = []
        self._shell_of: dict[str, Shell] = {}  # the last one for each host
        self._listener: socket.socket | None = None
        self._token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._beaten = 0.0  # when the last sign of life was sent

    def connect(self, hosts: list[str]) -> None:
        """Start an agent on each of the hosts; those that come up appear in `found`."""
        for command, served, environment in self._open_shells(self, hosts):
            over_stdio = self._listener is None
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if over_stdio else subprocess.DEVNULL,
                stdout=subprocess.PIPE if over_stdio else None,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # no Ctrl-C: the agents are told what to do
            )
            shell = Shell(process, served)
            self._shells.append(shell)
            self._shell_of |= dict.fromkeys(served, shell)
            _in_background(self._read_errors, shell)
            if process.stdin and process.stdout:
                channel = Channel(process.stdout.fileno(), process.stdin.fileno())
                _in_background(self._read, Node(served[0], channel))

    def beat(self) -> None:
        """Show every agent a sign of life, where the last one is a while ago."""
        now = time.monotonic()
        if now - self._beaten > BEAT_SECONDS:
            self._beaten = now
            for node in list(self.found.values()):
                node.tell("beat")

    def failures(self, hosts: list[str]) -> dict[str, str]:
        """Return why no agent comes up, for each of the hosts whose remote shell has ended without one."""
        missing = [host for host in hosts if host not in self.found]
        return {host: self.pending(host) for host in missing if self._shell_of[host].has_failed(host)}

    def forget(self, hosts: list[str]) -> None:
        """Expect other agents on these hosts: they are connected to again."""
        with self._lock:
            for host in hosts:
                self.found.pop(host, None)

    def pending(self, host: str) -> str:
        """Return the last word about a host whose agent has not spoken yet."""
        return self._shell_of[host].reason(host)

    def close(self) -> None:
        """End all connections and remote shells; agents that still live end their ranks."""
        for node in list(self.found.values()):
            node.channel.close()
        for shell in self._shells:
            if shell.process.stdin:
                with contextlib.suppress(OSError):
                    shell.process.stdin.close()
        # An agent whose connection has ended leaves, and its remote shell with it, unless the machine is gone.
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + LEAVE_SECONDS
            for shell in self._shells:
                shell.end(number, deadline)
        if self._listener:
            self._listener.close()

    def _listen(self) -> tuple[list[str], int]:
        """Wait for agents that connect back; return our addresses and the port."""
        if self._listener is None:
            self._listener = socket.create_server(("", 0), backlog=1024)
            _in_background(self._accept, self._listener)
        return [address for _, address, _ in own_addresses()] or ["127.0.0.1"], self._listener.getsockname()[1]

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has been closed
            while True:
                _in_background(self._greet, listener.accept()[0])

    def _greet(self, connection: socket.socket) -> None:
        """Let an agent in that knows the token and comes from a host that we have asked for."""
        connection.settimeout(CONNECT_SECONDS)
        with contextlib.suppress(OSError, ValueError):
            token, host = connection.makefile().readline(1024).split()
            is_expected = host in self._shell_of and host not in self.found
            if secrets.compare_digest(token, self._token) and is_expected:
                connection.sendall(b"+")
                connection.settimeout(None)
                self._read(Node(host, Channel.over(connection)))
        connection.close()

    def _read(self, node: Node) -> None:
        for message in node.channel.messages(_print):
            node.heard = time.monotonic()
            node.said[message["say"]] = message
            with self._lock:
                self.found.setdefault(node.host, node)
        node.is_closed = True

    def _read_errors(self, shell: Shell) -> None:
        assert shell.process.stderr is not None
        for raw in shell.process.stderr:
            line = raw.decode(errors="replace")
            if line.strip():
                shell.lines.append(line.strip())
            if any(host in self.found for host in shell.hosts):
                sys.stderr.write(line)
                sys.stderr.flush()
        shell.all_read.set()


def is_passing(reason: str) -> bool:
    """Return whether a remote shell that failed for this reason may succeed a little later."""
    return any(sign.lower() in reason.lower() for sign in PASSING)


def _over_ssh(nodes: Nodes, hosts: list[str]) -> list[tuple[list[str], list[str], None]]:
    return [(ssh_command(host, [sys.executable, *AGENT, host]), [host], None) for host in hosts]


def _over_pdsh(nodes: Nodes, hosts: list[str]) -> list[tuple[list[str], list[str], dict[str, str]]]:
    addresses, port = nodes._listen()
    words = [sys.executable, *AGENT, "--connect", ",".join(addresses), "--port", str(port), "--token", nodes._token]
    command, environment = pdsh_command(hosts, "exec " + shlex.join(words) + " %h")
    return [(command, hosts, environment)]


def _over_srun(nodes: Nodes, hosts: list[str]) -> list[tuple[list[str], list[str], dict[str, str]]]:
    addresses, port = nodes._listen()
    words = [sys.executable, *AGENT, "--connect", ",".join(addresses), "--port", str(port)]
    command, environment = srun_command(hosts, words)
    return [(command, hosts, environment | {TOKEN_VARIABLE: nodes._token})]


SHELLS: dict[str, Callable] = {"ssh": _over_ssh, "pdsh": _over_pdsh, "srun": _over_srun}


def _print(printed: bytes) -> None:
    sys.stdout.buffer.write(printed)
    sys.stdout.flush()


def _in_background(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()
