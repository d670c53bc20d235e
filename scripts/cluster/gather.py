"""Brings the nodes of a start together: an agent on each, and the address that their ranks meet on."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass

from scripts.cluster.channel import Message
from scripts.cluster.nodes import POLL_SECONDS, Node, Nodes, is_passing
from scripts.cluster.plan import Plan
from training.errors import USER_ERROR_EXIT_CODE
from training.interface import address_towards, interface_of, is_loopback

NO_NODES_CODE = 69  # EX_UNAVAILABLE of sysexits.h
RETRY_SECONDS = 2.0
FIRST_PATIENCE_SECONDS = 30.0  # for nodes that training could do without: they may still boot
PATIENCE_SECONDS = 10.0  # the same after a failure: it may be the reason why they do not answer
TELL_SECONDS = 10.0


class CannotStart(Exception):
    """There is no way to start: the message says why, and the exit code of the launch."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Meeting:
    """The nodes of a start.

    Attributes:
        nodes: those that take part, that of rank 0 first.
        addresses: of each, by which the others reach it.
        interfaces: on which these lie, '' where that could not be found.
        port: that the ranks meet on, on the first.
        has_gpus: whether the ranks run on GPUs.
    """

    nodes: list[Node]
    addresses: list[str]
    interfaces: list[str]
    port: int
    has_gpus: bool

    def environment(self, node_rank: int) -> dict[str, str]:
        """Return what gloo, NCCL and DeepSpeed must know on a node; NCCL reads '=name' as exactly this interface."""
        interface = self.interfaces[node_rank]
        chosen = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
        return chosen if self.has_gpus else chosen | {"DS_ACCELERATOR": "cpu"}


def gather(nodes: Nodes, plan: Plan, prepare: Message, received: list[int], *, is_restart: bool) -> Meeting | None:
    """Connect to the plan's hosts and wait until enough of them are ready; None where a signal came first.

    Raises:
        CannotStart: where too few answer in time or for good, or one cannot do its part.
    """
    started = time.monotonic()
    retry_at: dict[str, float] = {}
    told_at = started + TELL_SECONDS
    asked: set[str] = set()
    nodes.connect(plan.hosts)
    while not received:
        now = time.monotonic()
        for host, node in list(nodes.found.items()):
            if host not in asked:
                asked.add(host)
                node.tell("prepare", **prepare)
        ready = [host for host in plan.hosts if host in nodes.found and "ready" in nodes.found[host].said]
        missing = [host for host in plan.hosts if host not in ready]
        failed = nodes.failures(missing) | {host: nodes.found[host].lost() for host in missing if _is_lost(nodes, host)}
        for_good = [host for host, reason in failed.items() if not is_passing(reason)]
        waited_s = now - started
        if not missing:
            return _meet(nodes, plan, ready)
        is_settled = len(failed) == len(missing) or waited_s > PATIENCE_SECONDS
        if for_good and is_settled and not is_restart:
            raise CannotStart(_who(failed, missing, nodes), USER_ERROR_EXIT_CODE)
        if plan.usable_nodes(len(ready)) and waited_s > (PATIENCE_SECONDS if is_restart else FIRST_PATIENCE_SECONDS):
            return _meet(nodes, plan, ready)
        too_few = len(for_good) > len(plan.hosts) - plan.min_nodes
        if waited_s > plan.start_timeout_s or (is_settled and too_few):
            reached = f"{len(ready)} of {len(plan.hosts)} nodes reached, {plan.min_nodes} needed"
            raise CannotStart(f"{reached}: {_who(failed, missing, nodes)}", NO_NODES_CODE)
        if now > told_at:
            told_at = float("inf")
            print(f"waiting for {_who(failed, missing, nodes)}", file=sys.stderr, flush=True)
        for host in failed:
            retry_at.setdefault(host, now + RETRY_SECONDS)
        if due := [host for host in failed if now >= retry_at[host]]:
            nodes.forget(due)
            asked -= set(due)
            nodes.connect(due)
            for host in due:
                del retry_at[host]
        time.sleep(POLL_SECONDS)
    return None


def _meet(nodes: Nodes, plan: Plan, ready: list[str]) -> Meeting:
    """Check that the nodes can do their part, and find where they meet."""
    said = {host: nodes.found[host].said["ready"] for host in ready}
    if wrong := [f"{host}: {answer['error']}" for host, answer in said.items() if "error" in answer]:
        raise CannotStart("; ".join(wrong), USER_ERROR_EXIT_CODE)
    count = plan.usable_nodes(len(ready))
    if not count:
        raise CannotStart(f"{len(ready)} nodes cannot share the global batch", NO_NODES_CODE)
    used = ready[:count]
    gpus = {host: said[host]["gpus"] for host in used}
    has_gpus = any(gpus.values())
    if has_gpus and (short := [f"{host} has {n}" for host, n in gpus.items() if n < plan.ranks_per_node]):
        raise CannotStart(f"{plan.ranks_per_node} GPUs per node asked for: {', '.join(short)}", USER_ERROR_EXIT_CODE)
    known = [said[host]["address"] for host in used]
    addresses = [
        address_towards(known, said[host]["addresses"]) if is_loopback(address) else address
        for host, address in zip(used, known, strict=True)
    ]
    if count == 1:
        addresses = ["127.0.0.1"]
    if "" in addresses:
        alone = used[addresses.index("")]
        raise CannotStart(f"{alone}: no address that the other nodes could reach", USER_ERROR_EXIT_CODE)
    pairs = zip(used, addresses, strict=True)
    interfaces = [interface_of(address, said[host]["addresses"]) for host, address in pairs]
    return Meeting([nodes.found[host] for host in used], addresses, interfaces, said[used[0]]["port"], has_gpus)


def _is_lost(nodes: Nodes, host: str) -> bool:
    return host in nodes.found and bool(nodes.found[host].lost())


def _who(failed: dict[str, str], missing: list[str], nodes: Nodes) -> str:
    """Name every missing host and why it is missing."""
    named = []
    for host in missing:
        reason = failed.get(host) or nodes.pending(host)
        reason = re.sub(rf"^ssh: connect to host {re.escape(host)} port \d+: ", "", reason)
        named.append(reason if reason.startswith(host) else f"{host}: {reason}")
    return "; ".join(named)
