"""What the measured network means: functions from `network.measure_network` and `tcp_paths.try_paths` to rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from planning.doctor.table import Row, some_of
from planning.doctor.tcp_paths import LARGE_BYTES, LARGE_MESSAGES, FailedPath
from training.observe.units import format_bytes, format_duration

SLOW_SHARE = 1 / 3  # of what the other hosts reach
PROMISED_SHARE = 1 / 10  # of what the interface reports; one stream over TCP reaches a part of it only
FLOAT32_BYTES = 4
# fp32 values per parameter that a rank sends and receives in a step (Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054,
# section 7: 2 for stages 1 and 2, as in data parallelism, 3 for stage 3).
VOLUME_PER_PARAMETER = {1: 2, 2: 2, 3: 3}
VOLUME_OF_ALL_REDUCE = 2
# Phase in which the check failed (`network.measure_network`) -> what that means, from the earliest to the latest.
PHASES = {
    "meet": "cannot reach the first host's port",
    "join": "the ranks do not find each other",
    "send": "messages between the ranks fail",
}

Answers = Mapping[str, Mapping[str, Any]]


def assess_network(answers: Answers, interfaces: Mapping[str, str]) -> list[Row]:
    """Assess what all hosts' probes measured together.

    Args:
        answers: of `network.measure_network`, by host.
        interfaces: by host, '' if unknown.
    """
    reports = [answer["report"] for answer in answers.values() if "report" in answer]
    if any("problem" in answer for answer in answers.values()) or not reports:
        return _assess_failure(answers)
    report, backend = reports[0], reports[0]["backend"]
    size, seconds = report["large"]
    speed = bus_bandwidth(size, seconds, report["ranks"])
    way = "within one machine"
    if len(answers) > 1:
        infiniband = sorted({link for answer in answers.values() for link in answer["infiniband"]})
        kind = f"InfiniBand ({some_of(infiniband)})" if infiniband else "Ethernet"
        way = f"over {', '.join(sorted({*interfaces.values()} - {''})) or 'an unknown interface'}, {kind}"
    found = (
        f"{report['ranks']} ranks, {backend} {way}: {report['small'][1] * 1e3:.2f} ms for a small message, "
        f"{format_bytes(size)} at {format_bytes(speed)}/s"
    )
    rows = [Row("all-reduce", "ok", found)]
    if len(answers) > 1:
        promised = {host: answer["interface_mbit"] * 1e6 / 8 for host, answer in answers.items()}
        rows += assess_links(report["links"], promised if backend == "gloo" else {})
    return rows


def _assess_failure(answers: Answers) -> list[Row]:
    """Name the hosts that did not come as far as the others."""
    failed = {host: answer for host, answer in answers.items() if "problem" in answer}
    for phase, found in PHASES.items():
        hosts = [host for host, answer in failed.items() if answer.get("phase", "meet") == phase]
        if hosts:
            cure = "open all ports between the hosts; look at cables and MTU, for NCCL set NCCL_DEBUG=INFO"
            return [Row("all-reduce", "wrong", f"{found}: {failed[hosts[0]]['problem']}", cure, some_of(hosts))]
    return []


def bus_bandwidth(size_bytes: int, seconds: float, ranks: int) -> float:
    """Return bytes per second over the slowest link of a ring all-reduce, as nccl-tests counts it.

    Source: nccl-tests, doc/PERFORMANCE.md: size / time x 2 (n - 1) / n.
    """
    return size_bytes / seconds * 2 * (ranks - 1) / ranks


def assess_links(links: Sequence[Sequence[Any]], promised: Mapping[str, float]) -> list[Row]:
    """Name the hosts that are slow with all others, else the slowest link.

    Args:
        links: two hosts and bytes per second between them.
        promised: bytes per second by the host's interface; 0 if unknown.
    """
    best: dict[str, float] = {}
    for first, second, speed in links:
        best[first] = max(best.get(first, 0.0), speed)
        best[second] = max(best.get(second, 0.0), speed)
    rows = []
    for host, speed in best.items():
        others = statistics.median(other for name, other in best.items() if name != host)
        if speed < SLOW_SHARE * others:
            found = f"{format_bytes(speed)}/s at best, the others reach {format_bytes(others)}/s"
            rows.append(Row("links", "warning", found, _link_cure(host), host))
    first, second, speed = min(links, key=lambda link: link[2])
    pair, lowest = f"{first} - {second}", min(promised.get(host, 0.0) for host in (first, second))
    if not rows and speed < PROMISED_SHARE * lowest:
        found = f"{pair}: {format_bytes(speed)}/s, the interface promises {format_bytes(lowest)}/s"
        rows.append(Row("links", "warning", found, _link_cure(f"{first} or {second}"), pair))
    return rows or [Row("links", "ok", f"slowest {pair}, {format_bytes(speed)}/s")]


def _link_cure(host: str) -> str:
    return f"look at cable, switch port and duplex of {host} (ethtool), and at what else sends there"


def assess_step(report: Mapping[str, Any], name: str, parameters: int, zero_stage: int) -> Row:
    """Estimate the communication of a step that nothing hides.

    A step moves `VOLUME_PER_PARAMETER` values per parameter; an all-reduce, whose time is known, moves 2 per value.
    """
    size, seconds = report["large"]
    volume = VOLUME_PER_PARAMETER[zero_stage]
    gradients = FLOAT32_BYTES * parameters
    step = volume / VOLUME_OF_ALL_REDUCE * (gradients / size * seconds + report["small"][1])
    moved = format_bytes(volume * gradients)
    found = f"{name}: {moved} a rank and step, about {format_duration(step)} if nothing hides it"
    return Row("communication", "ok", found)


def assess_paths(failed: Sequence[FailedPath]) -> list[Row]:
    """Name the fewest hosts that all failed paths have in common (a minimum vertex cover, greedily).

    Of the two ends of a path that fails one way only, the target is named: its own firewall is the usual cause. Both
    are named if it fails both ways and nothing distinguishes them.
    """
    rows, left = [], list(failed)
    while left:
        one_way = sorted({(path.source, path.target) for path in left})  # in the same order in every process
        pairs = {frozenset(ends) for ends in one_way}
        weights = {
            host: (sum(host in pair for pair in pairs), sum(host == target for _, target in one_way))
            for ends in one_way
            for host in ends
        }
        guilty = max(weights, key=lambda host: weights[host])
        own = [path for path in left if guilty in (path.source, path.target)]
        others = sorted({end for path in own for end in (path.source, path.target)} - {guilty})
        suspects = [guilty, *(host for host in others if weights[host] == weights[guilty])]
        rows.append(_path_row(guilty, others, own, " or ".join(suspects)))
        left = [path for path in left if path not in own]
    return rows


def _path_row(guilty: str, others: list[str], paths: Sequence[FailedPath], suspects: str) -> Row:
    """Return the row of a host of which these paths failed."""
    if all(path.lacks == LARGE_MESSAGES for path in paths):
        size = format_bytes(LARGE_BYTES)
        found = f"messages of {size} are lost between {guilty} and {some_of(others)}, small ones arrive"
        cure = f"a smaller MTU on the way: compare ip link on both and on the switch, ping -M do -s 1472 {guilty}"
        return Row("all-reduce", "wrong", found, cure, suspects)
    inward = [path for path in paths if path.target == guilty]
    found = f"{guilty} cannot connect to {some_of(others)}"
    if inward:
        ports = some_of([str(port) for port in sorted({path.port for path in inward})])
        found = f"{some_of(sorted({path.source for path in inward}))} cannot connect to {guilty}, port {ports}"
    cure = f"a firewall on {suspects} or before it: open all ports between the hosts"
    return Row("all-reduce", "wrong", found, cure, suspects)
