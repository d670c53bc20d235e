"""Checks that the nodes of a start fit together: the same software, and one folder for the logs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from zerovision.launch.cluster.channel import Message
from zerovision.launch.cluster.nodes import POLL_SECONDS, Nodes
from zerovision.training.observe.environment import usual_value
from zerovision.training.world.network_interfaces import address_towards, is_loopback

HERE = "this machine"
SHOWN = 12  # letters of a hash
SEEN_SECONDS = 5.0  # within which what one node writes must be seen by the others
ANSWER_SECONDS = 30.0  # the same, by an agent on a loaded machine


def differences(software: Mapping[str, Mapping[str, str]], decisive: Mapping[str, str]) -> dict[str, str]:
    """Return what differs, for each machine that has another version or other code than most.

    Args:
        software: `zerovision.training.observe.environment.software` by machine.
        decisive: whose value counts as usual if there are as many of two.
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
    """Return why a folder cannot be used for the logs, for each of the hosts that do not share it with the others.

    The first host's agent writes a file there, and removes it before its ranks start; all others look for it. If none
    of several finds it, the first host is the odd one; of two that share nothing neither can be trusted.
    """
    first, *others = hosts
    if not others:
        return {}
    marked = _ask(nodes, [first], "marked", "mark", folder=folder).get(first, {"error": _no_answer(folder)})
    if "error" in marked:
        return {first: marked["error"]}
    seen = _ask(nodes, others, "seen", "see", mark=marked["mark"], seconds=SEEN_SECONDS)
    silent = {host: _no_answer(folder) for host in others if host not in seen}
    blind = [host for host, answer in seen.items() if not answer["is_seen"]]
    odd = blind
    if blind == others:
        odd = [first] if len(others) > 1 else hosts
    return silent | dict.fromkeys(odd, f"what {first} writes in {folder} does not appear on {', '.join(blind)}")


def reachable_addresses(known: Sequence[str], own: Sequence[Sequence[tuple[str, str, str]]]) -> list[str]:
    """Return the address by which the others reach each machine, '' if there is none.

    Args:
        known: where ssh or Slurm came in, or what the machine's name means elsewhere; '' if unknown.
        own: `zerovision.training.world.network_interfaces.own_addresses` of each.
    """
    if len(known) == 1:
        return ["127.0.0.1"]
    pairs = zip(known, own, strict=True)
    return [address_towards(known, addresses) if is_loopback(address) else address for address, addresses in pairs]


def by_reason(unfit: Mapping[str, str]) -> str:
    """Return machines and reasons as one line, each reason once."""
    machines: dict[str, list[str]] = {}
    for machine, reason in unfit.items():
        machines.setdefault(reason, []).append(machine)
    return "; ".join(f"{', '.join(named)}: {reason}" for reason, named in machines.items())


def _ask(nodes: Nodes, hosts: list[str], answer: str, what: str, **values: object) -> dict[str, Message]:
    """Ask the agents on some hosts; return their answers by host, without those that do not come in time."""
    asked = {host: nodes.found[host] for host in hosts}
    for node in asked.values():
        node.messages.pop(answer, None)
        node.send(what, **values)
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline and any(
        answer not in node.messages and not node.lost() for node in asked.values()
    ):
        nodes.beat()
        time.sleep(POLL_SECONDS)
    return {host: node.messages[answer] for host, node in asked.items() if answer in node.messages}


def _no_answer(folder: str) -> str:
    return f"no answer about {folder} within {ANSWER_SECONDS:.0f} s: look there whether its disk hangs"
