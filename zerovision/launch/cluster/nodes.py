"""The launch's side of its nodes: starts an agent on each through a remote shell, and receives their messages.

A remote shell is a function from a host to the command that starts an agent there, ssh or srun, and its environment;
messages go over the command's stdin and stdout.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from zerovision.launch.cluster.agent import BEAT_SECONDS, LOST_SECONDS
from zerovision.launch.cluster.channel import Channel, Message
from zerovision.launch.cluster.hosts import Command, srun_command, ssh_command
from zerovision.training.base.places import LAUNCH

LINES_KEPT = 10
POLL_SECONDS = 0.05
LEAVE_SECONDS = 1.0
LAST_LINES_SECONDS = 1.0
# A remote shell that fails with these may succeed a little later: the machine boots, or its network is briefly down.
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
    "connection failure",  # srun's, until Slurm counts the node as down, and requeues the job by itself
    "Node failure",
)
AGENT = [sys.executable, "-u", str(LAUNCH / "cluster/agent.py")]
SHELLS: dict[str, Callable[[str, list[str]], Command]] = {"ssh": ssh_command, "srun": srun_command}


@dataclass
class Node:
    """An agent on a host, and the messages it has sent."""

    host: str
    channel: Channel
    shell: Shell | None = None  # whose process owns the channel's files
    heard: float = field(default_factory=time.monotonic)
    is_closed: bool = False
    messages: dict[str, Message] = field(default_factory=dict)  # the last message of each kind
    end_by: float = math.inf  # when it is given up, on the monotonic clock

    def is_working(self) -> bool:
        """Return whether its ranks may still run."""
        return "ended" not in self.messages and not self.lost() and time.monotonic() < self.end_by

    def lost(self) -> str:
        """Return why the agent counts as lost, '' if it does not."""
        if "ended" in self.messages:
            return ""
        if self.is_closed:
            return f"{self.host} is lost: its connection ended"
        silent_s = time.monotonic() - self.heard
        return f"{self.host} is lost: no sign of life for {silent_s:.0f} s" if silent_s > LOST_SECONDS else ""

    @property
    def was_ended(self) -> bool:
        """Whether its ranks were ended because of what happened elsewhere."""
        return self.end_by < math.inf

    def end(self, within_s: float) -> None:
        """Order it, once, to end its ranks at once; it is given up after this many seconds."""
        if not self.was_ended:
            self.end_by = time.monotonic() + within_s
            self.send("end")

    def send(self, what: str, **values: object) -> None:
        """Send a message."""
        if not self.channel.send({"kind": what, **values}):
            self.is_closed = True


@dataclass
class Shell:
    """A running remote shell, and the last lines that it wrote on stderr."""

    process: subprocess.Popen
    host: str
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))
    all_read: threading.Event = field(default_factory=threading.Event)

    def end(self, number: int, deadline: float) -> None:
        """Send it a signal (0: none) if it still runs, and give it until the deadline to leave."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if number and self.process.poll() is None:
                os.killpg(self.process.pid, number)
            self.process.wait(max(0.0, deadline - time.monotonic()))

    def has_failed(self) -> bool:
        """Return whether it has ended, so that there will be no agent on its host."""
        if self.process.poll() is None:
            return False
        # Its last lines contain the reason. A process that it left may keep stderr open: that is waited for once.
        self.all_read.wait(LAST_LINES_SECONDS)
        self.all_read.set()
        return True

    def reason(self) -> str:
        """Return why no agent answers on its host."""
        lines = list(self.lines)
        return ([line for line in lines if self.host in line] or lines or ["no answer"])[-1]


class Nodes:
    """The agents of one start."""

    def __init__(self, remote_shell: str) -> None:
        """Prepare to start agents through 'ssh' or 'srun'."""
        self.found: dict[str, Node] = {}
        self._command_for = SHELLS[remote_shell]
        self._shells: list[Shell] = []
        self._shell_of: dict[str, Shell] = {}  # the last one for each host
        self._lock = threading.Lock()
        self._beaten = 0.0  # when the last heartbeat was sent

    def connect(self, hosts: list[str]) -> None:
        """Start an agent on each of the hosts; those that come up appear in `found`."""
        self._shells = [shell for shell in self._shells if shell.process.poll() is None]
        for host in hosts:
            command, environment = self._command_for(host, [*AGENT, host])
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # no Ctrl-C: the agents get orders
            )
            assert process.stdin
            assert process.stdout
            shell = Shell(process, host)
            self._shells.append(shell)
            self._shell_of[host] = shell
            _in_background(self._read_errors, shell)
            node = Node(host, Channel(process.stdout.fileno(), process.stdin.fileno()), shell)
            _in_background(self._read, node)

    def beat(self) -> None:
        """Send every agent a heartbeat, if the last one is long enough ago."""
        now = time.monotonic()
        if now - self._beaten > BEAT_SECONDS:
            self._beaten = now
            for node in list(self.found.values()):
                node.send("beat")

    def failures(self, hosts: list[str]) -> dict[str, str]:
        """Return why no agent comes up, for each of the hosts whose remote shell has ended without one."""
        missing = [host for host in hosts if host not in self.found]
        return {host: self.pending(host) for host in missing if self._shell_of[host].has_failed()}

    def forget(self, hosts: list[str]) -> None:
        """Expect other agents on these hosts: they are connected to again."""
        with self._lock:
            for host in hosts:
                self.found.pop(host, None)

    def pending(self, host: str) -> str:
        """Return why the agent of a host has not answered yet."""
        return self._shell_of[host].reason()

    def close(self) -> None:
        """End all connections and remote shells; agents that still live end their ranks."""
        for shell in self._shells:
            assert shell.process.stdin
            with contextlib.suppress(OSError):
                shell.process.stdin.close()
        # An agent whose connection has ended leaves, and its remote shell with it, unless the machine is gone.
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + LEAVE_SECONDS
            for shell in self._shells:
                shell.end(number, deadline)

    def _read(self, node: Node) -> None:
        for message in node.channel.messages(_print):
            node.heard = time.monotonic()
            node.messages[message["kind"]] = message
            with self._lock:
                self.found.setdefault(node.host, node)
        node.is_closed = True

    def _read_errors(self, shell: Shell) -> None:
        assert shell.process.stderr is not None
        for raw in shell.process.stderr:
            line = raw.decode(errors="replace")
            if line.strip():
                shell.lines.append(line.strip())
            if shell.host in self.found:
                sys.stderr.write(line)
                sys.stderr.flush()
        shell.all_read.set()


def is_passing(reason: str) -> bool:
    """Return whether a remote shell that failed for this reason may succeed a little later."""
    return any(sign.lower() in reason.lower() for sign in PASSING)


def _print(printed: bytes) -> None:
    sys.stdout.buffer.write(printed)
    sys.stdout.flush()


def _in_background(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()
