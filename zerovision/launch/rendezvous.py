"""The rendezvous of a start: agents on compatible nodes, and the address at which the ranks meet."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerovision.launch.nodes import PASSING, POLL_SECONDS, Message, Node, Nodes
from zerovision.launch.plan import Plan
from zerovision.training.base.errors import USER_ERROR_EXIT_CODE
from zerovision.training.observe.environment import usual_value
from zerovision.training.world.machine import address_towards, interface_of, is_loopback

NO_NODES_CODE = 69  # EX_UNAVAILABLE of sysexits.h
RETRY_SECONDS = 2.0
FIRST_PATIENCE_SECONDS = 30.0  # for nodes that training could do without: they may still be booting
PATIENCE_SECONDS = 10.0  # for such nodes after a failure, which may be the reason why they do not answer
PRINT_SECONDS = 10.0
SEEN_SECONDS = 5.0  # within which the other nodes must see a file that one node writes
ANSWER_SECONDS = 30.0  # for an agent on a loaded machine to answer
MAX_CPU_RANKS_PER_CORE = 8
LAUNCHING = "this machine"
SHOWN = 12  # characters of a hash


class CannotStart(Exception):
    """Raised if the ranks cannot be started; carries the reason and the exit code of the launch."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Rendezvous:
    """The nodes of a start."""

    nodes: list[Node]  # rank 0's first
    addresses: list[str]  # for each node, where the other nodes reach it
    interfaces: list[str]  # the network interface of each address, or '' if not found
    port: int  # on the first node, where the ranks meet
    has_gpus: bool

    def environment(self, node_rank: int) -> dict[str, str]:
        """Return the variables for gloo and NCCL on a node; NCCL reads '=name' as exactly this interface."""
        interface = self.interfaces[node_rank]
        return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}


@dataclass
class Candidate:
    """A host that a start may use."""

    host: str
    node: Node | None = None  # its agent, once the agent has been told to prepare
    failed: str = ""  # why the host cannot be used now; '' if it is ready or merely slow
    unfit: str = ""  # why the host was last left out although it answered; its disk may be mounted later
    is_left_out: bool = False  # whether to leave the host out until its agent has prepared again
    retry_at: float = math.inf

    @property
    def is_ready(self) -> bool:
        """Whether the host's agent is prepared."""
        return self.node is not None and "ready" in self.node.messages and not self.failed


class Roster:
    """The hosts that a start may use, in the order of the ranks, and whether each is ready; `look` updates them.

    The constructor starts an agent on each host that has none. Failed hosts are tried again after `retry_s` seconds.
    """

    def __init__(self, nodes: Nodes, hosts: Sequence[str], prepare: Message, retry_s: float = RETRY_SECONDS) -> None:
        self._nodes, self._prepare, self.retry_s = nodes, prepare, retry_s
        self._candidates = [Candidate(host) for host in hosts]
        self._started = time.monotonic()
        nodes.connect([host for host in hosts if host not in nodes.found])

    @property
    def seconds(self) -> float:
        """Seconds since the wait for the hosts began."""
        return time.monotonic() - self._started

    @property
    def ready(self) -> list[str]:
        """The hosts whose agents are prepared."""
        return [one.host for one in self._candidates if one.is_ready]

    @property
    def refusing(self) -> list[str]:
        """The hosts that another attempt is unlikely to reach."""
        return [one.host for one in self._candidates if one.failed and not one.unfit and not PASSING.search(one.failed)]

    @property
    def is_settled(self) -> bool:
        """Whether no missing host is likely to be ready soon."""
        return all(one.failed or one.is_ready for one in self._candidates) or self.seconds > PATIENCE_SECONDS

    def look(self) -> None:
        """Tell new agents to prepare, check which agents are ready, and retry hosts that failed some seconds ago."""
        self._nodes.beat()
        now = time.monotonic()
        for one in self._candidates:
            found = self._nodes.found.get(one.host)
            if found and found is not one.node:
                one.node, one.is_left_out = found, False
                found.prepare(self._prepare)
            lost = found.lost() if found else self._nodes.shell_of[one.host].failure()
            one.failed = lost or (one.unfit if one.is_left_out else "")
            one.retry_at = min(one.retry_at, now + self.retry_s) if one.failed else math.inf
            if now >= one.retry_at:
                one.retry_at, one.is_left_out = math.inf, False
                if lost:
                    one.node = None
                    self._nodes.connect([one.host])
                elif one.node:
                    one.node.prepare(self._prepare)

    def leave_out(self, unfit: Mapping[str, str]) -> None:
        """Leave out unfit hosts until their agents have prepared again; print the reasons if they are new."""
        out = [one for one in self._candidates if one.host in unfit]
        if any(one.unfit != unfit[one.host] for one in out):
            print(f"left out: {by_reason(unfit)}", file=sys.stderr, flush=True)
        for one in out:
            one.unfit = one.failed = unfit[one.host]
            one.is_left_out = True

    def reasons(self) -> str:
        """Return every missing host and why it is missing."""
        named = []
        for one in self._candidates:
            if not one.is_ready:
                reason = one.failed or one.unfit or self._nodes.shell_of[one.host].reason()
                reason = re.sub(rf"^ssh: (connect to host {re.escape(one.host)} port \d+: )?", "", reason)
                named.append(reason if reason.startswith(one.host) else f"{one.host}: {reason}")
        return "; ".join(named)


def next_rendezvous(
    nodes: Nodes, plan: Plan, received: list[int], doubtful: set[str], *, is_restart: bool
) -> Rendezvous | None:
    """Connect to the plan's hosts and wait until enough are ready; return None if a signal arrives first.

    Doubtful hosts are used only if there are too few others. CannotStart is raised if too few hosts can be used in time
    and, unless `is_restart`, even if only one refuses the connection or cannot be used.
    """
    roster = Roster(nodes, plan.hosts, plan.prepare)
    patience_s = PATIENCE_SECONDS if is_restart else FIRST_PATIENCE_SECONDS
    has_printed = False
    while not received:
        roster.look()
        if ready := _enough(roster, plan, doubtful, is_late=roster.seconds > patience_s):
            unfit, cure = unfit_hosts(nodes, plan, ready, is_restart=is_restart)
            if not unfit:
                unfit, cure = unshared(nodes, ready, plan.log_dir), "Use a --log-dir on a disk that all share."
            if not unfit:
                return _rendezvous(nodes, plan, ready)
            if not is_restart:
                raise CannotStart(f"{by_reason(unfit)}. {cure}".strip(), USER_ERROR_EXIT_CODE)
            roster.leave_out(unfit)
            continue
        refusing = roster.refusing
        if roster.is_settled and refusing and not is_restart:
            raise CannotStart(roster.reasons(), USER_ERROR_EXIT_CODE)
        too_few = len(refusing) > len(plan.hosts) - plan.min_nodes
        if roster.seconds > plan.given.start_timeout or (roster.is_settled and too_few):
            reached = f"{len(roster.ready)} of {len(plan.hosts)} nodes reached, {plan.min_nodes} needed"
            raise CannotStart(f"{reached}: {roster.reasons()}", NO_NODES_CODE)
        if roster.seconds > PRINT_SECONDS and not has_printed:
            has_printed = True
            print(f"waiting for {roster.reasons()}", file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)
    return None


def _enough(roster: Roster, plan: Plan, doubtful: set[str], *, is_late: bool) -> list[str]:
    """Return the hosts to start with, or [] to keep waiting for other hosts."""
    ready = roster.ready
    missing = [host for host in plan.hosts if host not in ready]
    trusted = [host for host in ready if host not in doubtful]
    if doubtful and (is_late or doubtful.issuperset(missing)) and plan.usable_nodes(len(trusted)):
        return trusted
    return ready if not missing or (is_late and plan.usable_nodes(len(ready))) else []


def unfit_hosts(nodes: Nodes, plan: Plan, ready: list[str], *, is_restart: bool) -> tuple[dict[str, str], str]:
    """Return why machines cannot train together, by machine, and what to do about it."""
    answers = {host: nodes.found[host].messages["ready"] for host in ready}
    if wrong := {host: answer["error"] for host, answer in answers.items() if "error" in answer}:
        return wrong, ""
    wanted, has_gpus = plan.given.ranks_per_node, any(answer["gpus"] for answer in answers.values())
    if short := {host: reason for host, answer in answers.items() if (reason := _too_few(answer, wanted, has_gpus))}:
        return short, f"{wanted} {'GPUs' if has_gpus else 'CPU ranks'} per node requested."
    software = {host: answer["software"] for host, answer in answers.items()}
    # By a restart, the launching machine's code may have changed; its software at the launch still breaks ties.
    others = differences(software if is_restart else {**software, LAUNCHING: plan.software}, plan.software)
    if plan.given.allow_differences:
        if others:
            print(f"warning: {by_reason(others)}", file=sys.stderr, flush=True)
    elif others:
        return others, "Make them equal (git pull, make setup), or add --allow-differences."
    return {}, ""


def _too_few(answer: Message, ranks: int, has_gpus: bool) -> str:
    """Return why a machine cannot run this many ranks, or '' if it can."""
    if has_gpus:
        return f"has {answer['gpus']} GPUs" if answer["gpus"] < ranks else ""
    most = answer["cores"] * MAX_CPU_RANKS_PER_CORE
    return f"no GPU found, and {answer['cores']} cores are enough for at most {most} CPU ranks" if most < ranks else ""


def differences(software: Mapping[str, Mapping[str, str]], decisive: Mapping[str, str]) -> dict[str, str]:
    """Return the differences of each machine whose versions or code differ from those of most machines.

    Args:
        software: result of `zerovision.training.observe.environment.software` by machine.
        decisive: the software whose values break a tie.
    """
    found: dict[str, list[str]] = {}
    for name in decisive:
        values = {machine: own.get(name, "none") for machine, own in software.items()}
        usual = usual_value(list(values.values()), decisive[name])
        for machine, value in values.items():
            if value != usual:
                found.setdefault(machine, []).append(f"{name} {value[:SHOWN]} (elsewhere {usual[:SHOWN]})")
    return {machine: ", ".join(all_of_it) for machine, all_of_it in found.items()}


def unshared(nodes: Nodes, hosts: list[str], folder: str) -> dict[str, str]:
    """Return why a folder cannot be used for the logs, for each host that does not share it.

    The first host's agent writes a file there, and removes it before its ranks start; the other agents look for it.
    """
    first, *others = hosts
    if not others:
        return {}
    no_answer = f"no answer about {folder} within {ANSWER_SECONDS:.0f} s: check whether its disk hangs"
    marked = nodes.ask([first], "mark", ANSWER_SECONDS, folder=folder).get(first, {"error": no_answer})
    if "error" in marked:
        return {first: marked["error"]}
    seen = nodes.ask(others, "see", ANSWER_SECONDS, mark=marked["mark"], seconds=SEEN_SECONDS)
    silent = {host: no_answer for host in others if host not in seen}
    blind = [host for host, answer in seen.items() if not answer["is_seen"]]
    odd = blind
    if blind == others:  # the first host is at fault; with only two hosts, either may be
        odd = [first] if len(others) > 1 else hosts
    return silent | dict.fromkeys(odd, f"what {first} writes in {folder} does not appear on {', '.join(blind)}")


def by_reason(unfit: Mapping[str, str]) -> str:
    """Return machines and reasons as one line, each reason once."""
    machines: dict[str, list[str]] = {}
    for machine, reason in unfit.items():
        machines.setdefault(reason, []).append(machine)
    return "; ".join(f"{', '.join(named)}: {reason}" for reason, named in machines.items())


def reachable_addresses(known: Sequence[str], own: Sequence[Sequence[tuple[str, str, str]]]) -> list[str]:
    """Return, for each machine, the address at which the other machines reach it, or ''.

    `known` has the address of each machine that ssh or Slurm used, or to which its name resolves, or ''; `own` has the
    `own_addresses` of each machine.
    """
    if len(known) == 1:
        return ["127.0.0.1"]
    pairs = zip(known, own, strict=True)
    return [address_towards(known, addresses) if is_loopback(address) else address for address, addresses in pairs]


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
        raise CannotStart(f"{alone} has no address that the other nodes can reach", USER_ERROR_EXIT_CODE)
    interfaces = list(map(interface_of, addresses, own))
    return Rendezvous([nodes.found[host] for host in used], addresses, interfaces, answers[used[0]]["port"], has_gpus)
