"""Starts an agent on each node of a launch, and exchanges messages with the agents.

A message is one line of JSON, preceded by a byte that no program prints, because a remote shell sends messages and the
ranks' output over the same stream. Writing up to 4096 bytes to a pipe is atomic, so the ranks' output may appear before
or after a message, but never inside it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any

from zerovision.launch.hosts import SHELLS
from zerovision.training.base.run_folder import LAUNCH

BEGIN = b"\x1e"  # ASCII's record separator
MESSAGE_LINE = re.compile(b"(" + BEGIN + rb"[^\n]*\n)")
READ_BYTES = 1 << 16
BEAT_SECONDS = 1.0
LOST_SECONDS = 10.0  # of silence, after which the other end is considered lost; unplugging a cable for 3 s is harmless
LINES_KEPT = 10
POLL_SECONDS = 0.05
SHELL_EXIT_SECONDS = 1.0
LAST_LINES_SECONDS = 1.0
# A remote shell that fails with one of these may succeed later: the machine may be booting, or its network may be down.
PASSING = re.compile(
    "refused|timed out|no route|unreachable|closed by|reset by|connection closed|banner|is lost"
    "|connection failure|node failure",  # from srun, until Slurm marks the node as down and requeues the job
    re.IGNORECASE,
)
AGENT = [sys.executable, "-u", str(LAUNCH / "agent.py")]

Message = dict[str, Any]


class Channel:
    """One end of a connection, over a pair of file descriptors."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._lock = Lock()

    def send(self, message: Message) -> bool:
        """Send a message; return whether it could be written."""
        rest = BEGIN + json.dumps(message).encode() + b"\n"
        with self._lock:
            try:
                while rest:
                    rest = rest[os.write(self._writing, rest) :]
            except OSError:
                return False
        return True

    def messages(self, pass_by: Callable[[bytes], object] = lambda _: None) -> Iterator[Message]:
        """Yield messages until the other end closes; pass all other bytes to `pass_by` immediately, in order."""
        waiting = b""
        while True:
            try:
                read = os.read(self._reading, READ_BYTES)
            except OSError:
                read = b""
            if not read:
                pass_by(waiting)
                return
            # Printed bytes and lines with messages alternate; the last message may be incomplete.
            *complete, rest = MESSAGE_LINE.split(waiting + read)
            printed, begin, line = rest.partition(BEGIN)
            waiting = begin + line
            for part in (*complete, printed):
                message = None
                if part.startswith(BEGIN):
                    with contextlib.suppress(ValueError):
                        message = json.loads(part[1:])
                if isinstance(message, dict):
                    yield message
                elif part:
                    pass_by(part)


@dataclass
class Node:
    """An agent on a host, and the messages it has sent."""

    host: str
    channel: Channel
    shell: Shell | None = None  # its process owns the channel's file descriptors
    lost_s: float = LOST_SECONDS  # seconds of silence after which the agent is considered lost
    heard: float = field(default_factory=time.monotonic)
    is_closed: bool = False
    messages: dict[str, Message] = field(default_factory=dict)  # the last message of each kind
    end_by: float = math.inf  # when the launch gives up on the agent, on the monotonic clock

    def is_working(self) -> bool:
        """Return whether the node's ranks may still be running."""
        return "ended" not in self.messages and not self.lost() and time.monotonic() < self.end_by

    def lost(self) -> str:
        """Return why the agent is considered lost, or '' if it is not."""
        if "ended" in self.messages:
            return ""
        if self.is_closed:
            return f"{self.host} is lost: its connection ended"
        silent_s = time.monotonic() - self.heard
        return f"{self.host} is lost: no sign of life for {silent_s:.0f} s" if silent_s > self.lost_s else ""

    @property
    def was_ended(self) -> bool:
        """Whether the node's ranks were ended because of an event elsewhere."""
        return self.end_by < math.inf

    def prepare(self, order: Message) -> None:
        """Tell the agent to prepare a start, and discard its messages from the previous start."""
        self.messages.clear()
        self.end_by = math.inf
        self.send("prepare", **order)

    def end(self, within_s: float) -> None:
        """Tell the agent to kill its ranks, unless it was already told to; give up on it after `within_s` seconds."""
        if not self.was_ended:
            self.end_by = time.monotonic() + within_s
            self.send("end")

    def send(self, what: str, **values: object) -> None:
        """Send the agent a message of kind `what`."""
        if not self.channel.send({"kind": what, **values}):
            self.is_closed = True


@dataclass
class Shell:
    """The process that runs an agent or connects to it, and the last lines of its stderr."""

    process: subprocess.Popen
    host: str
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))
    all_read: Event = field(default_factory=Event)

    def end(self, number: int, deadline: float) -> None:
        """Send the process a signal (0: none) if it is still running, and wait until the deadline for it to exit."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if number and self.process.poll() is None:
                os.killpg(self.process.pid, number)
            self.process.wait(max(0.0, deadline - time.monotonic()))

    def failure(self) -> str:
        """Return why no agent will run on the host, or '' while the process is running."""
        if self.process.poll() is None:
            return ""
        # The last lines contain the reason. A leftover child may keep stderr open, so wait only once for it to end.
        self.all_read.wait(LAST_LINES_SECONDS)
        self.all_read.set()
        return self.reason()

    def reason(self) -> str:
        """Return why no agent answers on the host."""
        lines = list(self.lines)
        return ([line for line in lines if self.host in line] or lines or ["no answer"])[-1]


class Nodes:
    """The agents of a launch, each reached through a shell: 'local' on this machine, 'ssh' or 'srun' on others."""

    def __init__(self, shell: str) -> None:
        self.found: dict[str, Node] = {}
        self.shell_of: dict[str, Shell] = {}  # the last shell of each host
        self._is_local, self._command_for = shell == "local", SHELLS[shell]
        self._shells: list[Shell] = []
        self._readers: list[Thread] = []
        self._lock, self._beaten = Lock(), 0.0  # when the last heartbeat was sent

    def connect(self, hosts: list[str]) -> None:
        """Start an agent on each host; agents that answer appear in `found`."""
        self._shells = [shell for shell in self._shells if shell.process.poll() is None]
        for host in hosts:
            with self._lock:
                self.found.pop(host, None)
            start = self._start_here if self._is_local else self._start_remotely
            node = start(*self._command_for(host, [*AGENT, host]), host)
            assert node.shell
            self._shells.append(node.shell)
            self.shell_of[host] = node.shell
            self._read_with(self._read, node)

    def _start_remotely(self, command: list[str], environment: dict[str, str] | None, host: str) -> Node:
        """Start an agent whose messages go over the shell's standard input and output, mixed with the ranks' output."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # In its own session, the shell does not receive Ctrl-C; the agents receive orders instead.
        process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)  # type: ignore[call-overload]
        shell = Shell(process, host)
        self._read_with(self._read_errors, shell)
        return Node(host, Channel(process.stdout.fileno(), process.stdin.fileno()), shell, LOST_SECONDS)

    def _start_here(self, command: list[str], environment: dict[str, str] | None, host: str) -> Node:
        """Start an agent whose messages go over a separate pipe, because the ranks print to this process's output."""
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb"):
            command = [*command, str(writing)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writing], start_new_session=True)
        assert process.stdin
        shell = Shell(process, host)
        shell.all_read.set()
        # The pipe closes when the agent exits. Silence is no sign of failure: all processes may have been paused, by
        # Ctrl-Z or with a container.
        return Node(host, Channel(reading, process.stdin.fileno()), shell, math.inf)

    def beat(self) -> None:
        """Send every agent a heartbeat if one is due."""
        now = time.monotonic()
        if now - self._beaten > BEAT_SECONDS:
            self._beaten = now
            for node in list(self.found.values()):
                node.send("beat")

    def ask(self, hosts: list[str], what: str, seconds: float, /, **values: object) -> dict[str, Message]:
        """Send an order to the agents on some hosts; return, by host, the answers that arrive in time."""
        asked = {host: self.found[host] for host in hosts}
        for node in asked.values():
            node.messages.pop(what, None)
            node.send(what, **values)
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(what not in one.messages and not one.lost() for one in asked.values()):
            self.beat()
            time.sleep(POLL_SECONDS)
        return {host: node.messages[what] for host, node in asked.items() if what in node.messages}

    def close(self) -> None:
        """Close all connections and shells, which makes agents that are still running end their ranks."""
        for shell in self._shells:
            assert shell.process.stdin
            with contextlib.suppress(OSError):
                shell.process.stdin.close()
        # When an agent's connection is closed, the agent exits and so does its shell, unless the machine is gone.
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + SHELL_EXIT_SECONDS
            for shell in self._shells:
                shell.end(number, deadline)
        for reader in self._readers:  # if one prints while Python shuts down, Python aborts
            reader.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self.found, self.shell_of, self._shells = {}, {}, []

    def _read_with(self, read: Callable[..., None], source: Node | Shell) -> None:
        # Without those that have ended: a host that is down is tried again and again.
        self._readers = [*filter(Thread.is_alive, self._readers), Thread(target=read, args=(source,), daemon=True)]
        self._readers[-1].start()

    def _read(self, node: Node) -> None:
        for message in node.channel.messages(_print):
            node.heard, node.messages[message["kind"]] = time.monotonic(), message
            with self._lock:
                if self.shell_of.get(node.host) is node.shell:
                    self.found[node.host] = node
        node.is_closed = True

    def _read_errors(self, shell: Shell) -> None:
        assert shell.process.stderr is not None
        for raw in shell.process.stderr:
            line = raw.decode(errors="replace")
            if line.strip():
                shell.lines.append(line.strip())
            if shell.host in self.found:
                print(line, end="", file=sys.stderr, flush=True)
        shell.all_read.set()


def _print(printed: bytes) -> None:
    sys.stdout.buffer.write(printed)
    sys.stdout.flush()
