"""The rendezvous of a start: an agent on each node, and the address that the ranks meet on."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from zerovision.launch.cluster.agreement import HERE, by_reason, differences, reachable_addresses, unshared
from zerovision.launch.cluster.channel import Message
from zerovision.launch.cluster.nodes import POLL_SECONDS, Node, Nodes, is_passing
from zerovision.launch.cluster.plan import Plan
from zerovision.training.base.errors import USER_ERROR_EXIT_CODE
from zerovision.training.world.network_interfaces import interface_of

NO_NODES_CODE = 69  # EX_UNAVAILABLE of sysexits.h
RETRY_SECONDS = 2.0
FIRST_PATIENCE_SECONDS = 30.0  # for nodes that training could do without: they may still boot
PATIENCE_SECONDS = 10.0  # the same after a failure: it may be the reason why they do not answer
PRINT_SECONDS = 10.0
RETURN_SECONDS = 30.0  # between two attempts to reach a host that a running start lacks; see `Absent`


@dataclass
class Hosts:
    """What a launch remembers of its hosts from one start to the next.

    Attributes:
        returns: how often each came back into a running training.
        hangs: how often each had the rank that hung.
        doubtful: those that the next start leaves out if it can.
    """

    returns: Counter[str] = field(default_factory=Counter)
    hangs: Counter[str] = field(default_factory=Counter)
    doubtful: set[str] = field(default_factory=set)

    def hung(self, host: str) -> None:
        """Count a hang: from the second one on the host is doubtful."""
        self.hangs[host] += 1
        if self.hangs[host] > 1:
            self.doubtful = {host}


class CannotStart(Exception):
    """The ranks cannot be started; has the reason and the exit code of the launch."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Rendezvous:
    """The nodes of a start.

    Attributes:
        nodes: those that take part, that of rank 0 first.
        addresses: of each, by which the others reach it.
        interfaces: of these addresses, '' if not found.
        port: that the ranks meet on, on the first.
        has_gpus: whether the ranks run on GPUs.
    """

    nodes: list[Node]
    addresses: list[str]
    interfaces: list[str]
    port: int
    has_gpus: bool

    def environment(self, node_rank: int) -> dict[str, str]:
        """Return what gloo and NCCL must know on a node; NCCL reads '=name' as exactly this interface."""
        interface = self.interfaces[node_rank]
        return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}


def next_rendezvous(
    nodes: Nodes, plan: Plan, prepare: Message, received: list[int], doubtful: set[str], *, is_restart: bool
) -> Rendezvous | None:
    """Connect to the plan's hosts and wait until enough of them are ready; None if a signal came first.

    Those that are doubtful take part only if the others are not enough.

    Raises:
        CannotStart: if too few answer in time, or one refuses or cannot take part.
    """
    wait = _Wait(nodes, plan, prepare)
    patience_s = PATIENCE_SECONDS if is_restart else FIRST_PATIENCE_SECONDS
    while not received:
        wait.look()
        if ready := _enough(wait, plan, doubtful, is_late=wait.seconds > patience_s):
            unfit, cure = _unfit(nodes, plan, ready, is_restart=is_restart)
            if not unfit:
                unfit, cure = unshared(nodes, ready, plan.log_dir), "Give a --log-dir on a disk that all share."
            if not unfit:
                return _rendezvous(nodes, plan, ready)
            if not is_restart:
                raise CannotStart(f"{by_reason(unfit)}. {cure}".strip(), USER_ERROR_EXIT_CODE)
            wait.leave_out(unfit)
            continue
        refused = [host for host, reason in wait.failed.items() if host not in wait.unfit and not is_passing(reason)]
        if wait.is_settled and refused and not is_restart:
            raise CannotStart(wait.reasons(), USER_ERROR_EXIT_CODE)
        too_few = len(refused) > len(plan.hosts) - plan.min_nodes
        if wait.seconds > plan.given.start_timeout or (wait.is_settled and too_few):
            reached = f"{len(wait.ready)} of {len(plan.hosts)} nodes reached, {plan.min_nodes} needed"
            raise CannotStart(f"{reached}: {wait.reasons()}", NO_NODES_CODE)
        wait.print_once()
        wait.retry()
        time.sleep(POLL_SECONDS)
    return None


def _enough(wait: _Wait, plan: Plan, doubtful: set[str], *, is_late: bool) -> list[str]:
    """Return the hosts to start with, [] as long as others are waited for."""
    trusted = [host for host in wait.ready if host not in doubtful]
    if doubtful and (is_late or doubtful.issuperset(wait.missing)) and plan.usable_nodes(len(trusted)):
        return trusted
    return wait.ready if not wait.missing or (is_late and plan.usable_nodes(len(wait.ready))) else []


class Absent:
    """The hosts that a start lacks: asked again and again while it runs.

    Args:
        nodes: the agents of the start.
        plan: of the launch.
        prepare: the order for a new agent.
        used: hosts that take part.
        returns: how often each host has come back; counted on here. The more often, the longer until it is asked.
    """

    def __init__(self, nodes: Nodes, plan: Plan, prepare: Message, used: list[str], returns: Counter[str]) -> None:
        self._nodes, self._plan, self._used, self._returns = nodes, plan, used, returns
        absent = [host for host in plan.hosts if host not in used]
        nodes.forget(absent)
        self._after_s = RETURN_SECONDS * 2 ** max(returns[host] for host in absent)
        self._wait = _Wait(nodes, replace(plan, hosts=absent), prepare, self._after_s)

    def back(self) -> list[str]:
        """Return the hosts that are ready again, [] as long as training could not use more nodes with them."""
        wait = self._wait
        wait.look()
        wait.retry()
        if wait.seconds < self._after_s or self._plan.usable_nodes(len(self._used + wait.ready)) <= len(self._used):
            return []
        unfit, _ = _unfit(self._nodes, self._plan, self._used + wait.ready, is_restart=True)
        if unfit:
            wait.leave_out({host: unfit[host] for host in wait.ready if host in unfit})
            return []
        self._returns.update(wait.ready)
        return wait.ready


class _Wait:
    """The wait for the nodes of a start.

    Attributes:
        ready: hosts whose agents have prepared themselves, in the order of the plan.
        missing: the others.
        failed: why, for those of them that are not merely slow.
        unfit: why some hosts, whose agents do answer, may not take part; a disk may still be mounted there.
    """

    def __init__(self, nodes: Nodes, plan: Plan, prepare: Message, retry_s: float = RETRY_SECONDS) -> None:
        self.ready: list[str] = []
        self.missing: list[str] = plan.hosts
        self.failed: dict[str, str] = {}
        self.unfit: dict[str, str] = {}
        self._left_out: set[str] = set()  # those of the unfit that have no new order yet
        self._nodes, self._plan, self._prepare, self._retry_s = nodes, plan, prepare, retry_s
        self._ordered: set[str] = set()
        self._retry_at: dict[str, float] = {}
        self._started = time.monotonic()
        self._has_printed = False
        nodes.connect(plan.hosts)

    @property
    def seconds(self) -> float:
        """How long the wait has lasted."""
        return time.monotonic() - self._started

    @property
    def is_settled(self) -> bool:
        """Whether no missing host is likely to be ready in a moment."""
        return len(self.failed) == len(self.missing) or self.seconds > PATIENCE_SECONDS

    def look(self) -> None:
        """Send new agents the order to prepare, and update which hosts are ready."""
        self._nodes.beat()
        found = dict(self._nodes.found)
        for host in found.keys() - self._ordered:
            self._ordered.add(host)
            found[host].send("prepare", **self._prepare)
        lost = {host: reason for host, node in found.items() if (reason := node.lost())}
        self._left_out -= lost.keys()
        out = {**{host: self.unfit[host] for host in self._left_out}, **lost}
        self.ready = [
            host for host in self._plan.hosts if host in found and "ready" in found[host].messages and host not in out
        ]
        self.missing = [host for host in self._plan.hosts if host not in self.ready]
        self.failed = self._nodes.failures(self.missing) | out

    def leave_out(self, unfit: dict[str, str]) -> None:
        """Leave out hosts that answer, until they have prepared themselves again."""
        if unfit.items() - self.unfit.items():
            print(f"left out: {by_reason(unfit)}", file=sys.stderr, flush=True)
        self.unfit |= unfit
        self._left_out |= unfit.keys()

    def retry(self) -> None:
        """Order those that were left out some seconds ago to prepare again; connect again to the others."""
        now = time.monotonic()
        due = [host for host in self.failed if now >= self._retry_at.setdefault(host, now + self._retry_s)]
        if due:
            for host in self._left_out.intersection(due):
                del self._nodes.found[host].messages["ready"]
            gone = [host for host in due if host not in self._left_out]
            self._nodes.forget(gone)
            self._nodes.connect(gone)
            for host in due:
                del self._retry_at[host]
            self._ordered -= set(due)
            self._left_out -= set(due)

    def print_once(self) -> None:
        """Print, once and after some seconds, which hosts are missing."""
        if self.seconds > PRINT_SECONDS and not self._has_printed:
            self._has_printed = True
            print(f"waiting for {self.reasons()}", file=sys.stderr, flush=True)

    def reasons(self) -> str:
        """Return every missing host and why it is missing."""
        named = []
        for host in self.missing:
            reason = self.failed.get(host) or self.unfit.get(host) or self._nodes.pending(host)
            reason = re.sub(rf"^ssh: (connect to host {re.escape(host)} port \d+: )?", "", reason)
            named.append(reason if reason.startswith(host) else f"{host}: {reason}")
        return "; ".join(named)


def _unfit(nodes: Nodes, plan: Plan, ready: list[str], *, is_restart: bool) -> tuple[dict[str, str], str]:
    """Return why some of the machines cannot train together, by machine, and what to do about it.

    The code of the machine that launches may have changed by the time of a restart: it is not compared then, but its
    software at the time of the launch decides a tie between the nodes.
    """
    answers = {host: nodes.found[host].messages["ready"] for host in ready}
    if wrong := {host: answer["error"] for host, answer in answers.items() if "error" in answer}:
        return wrong, ""
    gpus, wanted = {host: answer["gpus"] for host, answer in answers.items()}, plan.given.ranks_per_node
    if any(gpus.values()) and (short := {host: f"has {n} GPUs" for host, n in gpus.items() if n < wanted}):
        return short, f"{wanted} GPUs per node asked for."
    software = {host: answer.get("software", {}) for host, answer in answers.items()}
    others = differences(software if is_restart else {**software, HERE: plan.software}, plan.software)
    if plan.given.allow_differences:
        if others:
            print(f"warning: {by_reason(others)}", file=sys.stderr, flush=True)
    elif others:
        return others, "Bring all to the same state (git pull, make setup), or train so with --allow-differences."
    return {}, ""


def _rendezvous(nodes: Nodes, plan: Plan, ready: list[str]) -> Rendezvous:
    """Check that there are enough nodes, and find where the ranks meet."""
    answers = {host: nodes.found[host].messages["ready"] for host in ready}
    count = plan.usable_nodes(len(ready))
    if not count:
        raise CannotStart(f"{len(ready)} nodes cannot share the global batch", NO_NODES_CODE)
    used = ready[:count]
    has_gpus = any(answers[host]["gpus"] for host in used)
    own = [answers[host]["addresses"] for host in used]
    addresses = reachable_addresses([answers[host]["address"] for host in used], own)
    if "" in addresses:
        alone = used[addresses.index("")]
        raise CannotStart(f"{alone}: no address that the other nodes could reach", USER_ERROR_EXIT_CODE)
    interfaces = list(map(interface_of, addresses, own))
    return Rendezvous([nodes.found[host] for host in used], addresses, interfaces, answers[used[0]]["port"], has_gpus)
