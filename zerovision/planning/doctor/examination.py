"""The examination: asks all machines, compares their answers, and returns the rows of the table."""

from __future__ import annotations

import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zerovision.launch.hosts import Command
from zerovision.launch.rendezvous import differences, reachable_addresses
from zerovision.planning.doctor.machine import assess_machine
from zerovision.planning.doctor.probe import PROBE, Answer, Probe, Unreachable, ask_all
from zerovision.planning.doctor.table import Row, join_hosts, some_of
from zerovision.training.base.units import format_bytes
from zerovision.training.config import TrainConfig
from zerovision.training.observe.environment import software
from zerovision.training.world.network_interfaces import interface_of

# Time limits of the answers.
FACTS_SECONDS, JOIN_SECONDS, NETWORK_SECONDS, PATHS_SECONDS = 300.0, 30.0, 60.0, 60.0  # a data set may be long to list
SEEN_SECONDS = 5.0  # within which a shared disk shows what another machine has written
HERE = "here"
CONNECT_SECONDS = 3.0

_listening: list[socket.socket] = []  # until the process ends


@dataclass(frozen=True)
class Request:
    """What is to be examined.

    Attributes:
        slots: ranks by host, in their order; 0 for all GPUs of a host, or one CPU rank. `HERE` is this machine, alone.
        command: returns the command that runs a program on a host.
        log_dir: absolute path of the folder of all logs.
        data: fields of `DataOptions`; None if no data set is examined.
        training: the configuration; None if no training is examined.
    """

    slots: Mapping[str, int]
    command: Callable[[str, list[str]], Command]
    log_dir: str
    data: Mapping[str, Any] | None
    training: TrainConfig | None = None

    @property
    def is_alone(self) -> bool:
        """Whether this machine alone is to train."""
        return list(self.slots) == [HERE]


def examine(request: Request) -> list[Row]:
    """Return all rows; equal rows of several hosts are one row."""
    with ExitStack() as stack:
        probes = {host: stack.enter_context(Probe(host, request.command(host, PROBE))) for host in request.slots}
        hosts, lost = ask_all(probes.values(), lambda probe: _ask_machine(probe, request))
        rows = [Row("hosts", "wrong", str(error), error.cure, host) for host, error in lost.items()]
        if hosts and not request.is_alone:
            rows = rows or [Row("hosts", "ok", f"{some_of(list(hosts))} answer")]
            rows += assess_versions(hosts, software()) + assess_copies(hosts)
            writing = [probes[host] for host, facts in hosts.items() if not facts["log_folder"]["problem"]]
            rows += _examine_shared_logs(request.log_dir, writing)
        has_gpus, all_ranks = any(facts["gpus"] for facts in hosts.values()), sum(request.slots.values())
        saved_bytes = _saved_bytes(request, hosts)
        for host, facts in hosts.items():
            facts["log_folder"]["saved_bytes"] = saved_bytes
            found = assess_machine(facts, request.slots[host], all_ranks, cluster_has_gpus=has_gpus)
            rows += [replace(row, host=host) for row in found]
        rows += _examine_network(request, hosts, probes)
    if request.is_alone:
        rows = [replace(row, host="") for row in rows]
    return join_hosts(rows)


def _ask_machine(probe: Probe, request: Request) -> Answer:
    """Return the facts of a machine."""
    facts = probe.ask("machine", FACTS_SECONDS, log_dir=request.log_dir, data=request.data)
    if "problem" in facts:
        raise Unreachable(f"the probe fails: {facts['problem']}", "bring the code there to the same commit")
    return facts


def _saved_bytes(request: Request, hosts: Mapping[str, Answer]) -> int:
    """Return the bytes of the weights and a checkpoint of the training, 0 if it is not known."""
    network = next((facts["data"]["network"] for facts in hosts.values() if "network" in facts["data"]), None)
    if request.training is None or network is None:
        return 0
    from zerovision.planning.run_workload import workload_of

    config = replace(request.training, image_channels=network["image_channels"])
    with suppress(Exception):  # a network that cannot be counted without data
        return workload_of(config, network["classes"], network["image_size"]).saved_bytes
    return 0


def assess_versions(hosts: Mapping[str, Answer], here: Mapping[str, str]) -> list[Row]:
    """Compare Python, libraries and code, uncommitted changes included; this machine's decide a tie."""
    cure = "the same commit (git status, git pull) and make setup in the repository there, or share its folder"
    same = ", ".join(f"{name} {version[:12]}" for name, version in here.items())
    differing = differences({**{host: facts["software"] for host, facts in hosts.items()}, HERE: here}, here)
    rows = [Row("versions", "wrong", found, cure, host) for host, found in differing.items()]
    return rows or [Row("versions", "ok", f"{same} on every host")]


def assess_copies(hosts: Mapping[str, Answer]) -> list[Row]:
    """Compare the hosts' copies of the data set, of those that could load it; the first one's decides a tie."""
    copies = {host: facts["data"] for host, facts in hosts.items() if "hash" in facts["data"]}
    if not copies:
        return []
    cure = "copy the data set there anew, or share its folder; only you know which of two copies is right"
    first = next(iter(copies.values()))
    rows = [
        Row("same data", "wrong", f"{copies[host]['holds']}: {found}", cure, host)
        for host, found in differences(copies, {"hash": first["hash"]}).items()
    ]
    return rows or [Row("same data", "ok", f"{first['holds']} on every host")]


def _examine_shared_logs(log_dir: str, probes: list[Probe]) -> list[Row]:
    """Let the first machine write a file into the log folder and the others look for it."""
    if len(probes) < 2:
        return []
    writer, *others = probes
    try:
        mark = writer.ask("leave_mark", FACTS_SECONDS, folder=log_dir)["mark"]
    except (Unreachable, KeyError):
        return []  # the rows of the network name a host that is gone
    answers, _ = ask_all(others, lambda probe: probe.ask("sees_mark", FACTS_SECONDS, mark=mark, seconds=SEEN_SECONDS))
    return assess_shared_logs(writer.host, {host: found.get("is_seen", False) for host, found in answers.items()})


def assess_shared_logs(writer: str, sees: Mapping[str, bool]) -> list[Row]:
    """Assess whether all hosts share the log folder: whether they see the file that `writer` has written there.

    If none of several others sees it, the writer is the odd one.
    """
    cure = "give a --log-dir on a disk that all hosts share, or mount it there"
    blind = [host for host, is_seen in sees.items() if not is_seen]
    if len(blind) == len(sees) > 1:
        found = f"what it writes into the log folder does not appear on {some_of(blind)}"
        return [Row("shared logs", "wrong", found, cure, writer)]
    found = f"what {writer} writes into the log folder does not appear there"
    rows = [Row("shared logs", "wrong", found, cure, host) for host in blind]
    return rows or [Row("shared logs", "ok", f"what {writer} writes into the log folder appears on every host")]


def _examine_network(request: Request, hosts: Mapping[str, Answer], probes: Mapping[str, Probe]) -> list[Row]:
    """Let the hosts on which torch loads connect to each other, and then measure an all-reduce of all ranks."""
    hosts = {host: facts for host, facts in hosts.items() if not facts["import_problem"]}
    use_gpu = all(facts["gpus"] and facts["torch_cuda"] for facts in hosts.values())
    ranks = {host: _ranks(request.slots[host], facts, use_gpu) for host, facts in hosts.items()}
    if sum(ranks.values()) < 2:
        return []
    known = [facts["reached_by"] or _address_of(host) for host, facts in hosts.items()]
    own = {host: facts["own_addresses"] for host, facts in hosts.items()}
    addresses = dict(zip(hosts, reachable_addresses(known, list(own.values())), strict=True))
    asked, first = [probes[host] for host in hosts], next(iter(hosts))
    if len(hosts) > 1 and (rows := assess_paths(_failed_paths(asked, addresses))):
        return rows
    interfaces = {host: interface_of(addresses[host], own[host]) for host in hosts}
    common = {
        "ranks": list(ranks.items()),
        "address": addresses[first],
        "port": hosts[first]["spare_port"],
        "run_id": secrets.token_hex(8),
        "use_gpu": use_gpu,
        "join_seconds": JOIN_SECONDS,
    }

    def measure(probe: Probe) -> Answer:
        limits = {"seconds": NETWORK_SECONDS, "interface": interfaces[probe.host]}
        return probe.ask("network", NETWORK_SECONDS + JOIN_SECONDS, host=probe.host, common=common, **limits)

    answers, lost = ask_all(asked, measure)
    answers |= {host: {"problem": str(error)} for host, error in lost.items()}
    way = f"over {', '.join(sorted({*interfaces.values()} - {''})) or 'an unknown interface'}"
    return [assess_all_reduce(answers, sum(ranks.values()), way if len(hosts) > 1 else "within one machine")]


def _ranks(slots: int, facts: Answer, use_gpu: bool) -> int:
    """Return how many ranks a host has in the network's check: at most its GPUs, or its cores if no host has GPUs."""
    most = len(facts["gpus"]) if use_gpu else facts["cores"]
    return min(slots or (most if use_gpu else 1), most)


def _address_of(host: str) -> str:
    """Return the IPv4 or IPv6 address of a name, '' if it has none here."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _failed_paths(probes: list[Probe], addresses: Mapping[str, str]) -> list[FailedPath]:
    """Let all hosts listen, each connect to the first and to the next one in a ring; return the paths that failed."""
    opened, _ = ask_all(probes, lambda probe: probe.ask("open_port", PATHS_SECONDS, address=addresses[probe.host]))
    ports = {host: answer["port"] for host, answer in opened.items() if "port" in answer}
    hosts = list(ports)
    following = dict(zip(hosts, hosts[1:] + hosts[:1], strict=True))

    def try_paths(probe: Probe) -> Answer:
        others = {hosts[0], following[probe.host]} - {probe.host}
        targets = [(host, addresses[host], ports[host]) for host in sorted(others)]
        return probe.ask("try_paths", PATHS_SECONDS, source=probe.host, targets=targets)

    tried, _ = ask_all([probe for probe in probes if probe.host in ports], try_paths)
    return [FailedPath(*path) for answer in tried.values() for path in answer.get("failed", ())]


def assess_all_reduce(answers: Mapping[str, Answer], ranks: int, way: str) -> Row:
    """Return the row of the all-reduce, with its rate as nccl-tests counts it.

    Args:
        answers: of `network.measure_network`, by host.
        ranks: that took part.
        way: by which the ranks reach each other, for the row.
    """
    problems = {host: answer["problem"] for host, answer in answers.items() if "problem" in answer}
    if problems:
        cure = "look at cables and MTU (ip link on each, ping -M do -s 1472 HOST); for NCCL set NCCL_DEBUG=INFO"
        found = f"the ranks cannot exchange: {next(iter(problems.values()))}"
        return Row("all-reduce", "wrong", found, cure, some_of(list(problems)))
    answer = next(iter(answers.values()))
    rate = answer["bytes"] / answer["seconds"] * 2 * (ranks - 1) / ranks  # nccl-tests, doc/PERFORMANCE.md
    found = f"{ranks} ranks, {answer['backend']} {way}: {format_bytes(answer['bytes'])} at {format_bytes(rate)}/s"
    return Row("all-reduce", "ok", found)


class FailedPath(NamedTuple):
    """From a host to a port of another one."""

    source: str
    target: str
    port: int


def open_port(address: str) -> Answer:
    """Listen at an address of this machine, by which the others reach it, and return the `port`."""
    _listening.append(socket.create_server((address, 0), backlog=1024))
    return {"port": _listening[-1].getsockname()[1]}


def try_paths(source: str, targets: Sequence[Sequence[Any]]) -> Answer:
    """Connect to each target.

    Args:
        source: this host's name.
        targets: name, address and port of each.

    Returns:
        `failed`: the fields of each `FailedPath`.
    """
    failed = [(name, port) for name, address, port in targets if not _connects(address, port)]
    return {"failed": [FailedPath(source, name, port) for name, port in failed]}


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def assess_paths(failed: Sequence[FailedPath]) -> list[Row]:
    """Return a row of the paths that failed, if any did: of the host that is in most of them, as a target if in one."""
    ends = Counter([path.target for path in failed] + [path.source for path in failed])
    found = some_of([f"{path.source} cannot connect to {path.target}, port {path.port}" for path in failed])
    return [
        Row("connections", "wrong", found, f"a firewall on {host} or before it: open all ports between the hosts", host)
        for host, _ in ends.most_common(1)
    ]
