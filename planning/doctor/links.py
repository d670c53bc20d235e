"""What the measured network means: pure functions from `network.measure_network` to rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from planning.doctor.table import Row, some_of
from training.observe.units import format_bytes, format_duration

SLOW_SHARE = 1 / 3  # of what the other hosts reach
PROMISED_SHARE = 1 / 10  # of what the interface says; one stream over TCP reaches a part of it only
FLOAT32_BYTES = 4
# fp32 values per parameter that a rank sends and receives in a step (Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054,
# section 7: 2 for stages 1 and 2, as data parallelism has, 3 for stage 3).
VOLUME_PER_PARAMETER = {1: 2, 2: 2, 3: 3}
VOLUME_OF_ALL_REDUCE = 2
# What the ranks of the check were at when they failed (`network.measure_network`) -> what that means.
PHASES = {
    "meet": "cannot reach the first host's port",
    "join": "the ranks do not find each other",
    "send": "messages between the ranks fail",
}

Answers = Mapping[str, Mapping[str, Any]]


def judge_failure(answers: Answers) -> list[Row]:
    """Name the hosts by which the all-reduce failed: those that did not come as far as the others."""
    failed = {host: answer for host, answer in answers.items() if "problem" in answer}
    for phase, found in PHASES.items():
        hosts = [host for host, answer in failed.items() if answer.get("phase", "meet") == phase]
        if hosts:
            problem = failed[hosts[0]]["problem"]
            cure = "open all ports between the hosts; look at cables and MTU, for NCCL set NCCL_DEBUG=INFO"
            return [Row("all-reduce", "wrong", f"{found}: {problem}", cure, some_of(hosts))]
    return []


def judge_network(answers: Answers, interfaces: Mapping[str, str]) -> list[Row]:
    """Judge what all hosts' probes measured together.

    Args:
        answers: of `network.measure_network`, by host.
        interfaces: by host, '' where not known.
    """
    reports = [answer["report"] for answer in answers.values() if "report" in answer]
    if any("problem" in answer for answer in answers.values()) or not reports:
        return judge_failure(answers)
    report, backend = reports[0], reports[0]["backend"]
    size, seconds = report["large"]
    speed = bus_bandwidth(size, seconds, report["ranks"])
    latency_ms = report["small_seconds"] * 1e3
    found = (
        f"{report['ranks']} ranks, {backend} {_way(answers, interfaces)}: "
        f"{latency_ms:.2f} ms for a small message, {format_bytes(size)} at {format_bytes(speed)}/s"
    )
    rows = [Row("all-reduce", "ok", found)]
    if len(answers) > 1:
        promised = {host: answer["interface_mbit"] * 1e6 / 8 for host, answer in answers.items()}
        rows += judge_links(report["links"], promised if backend == "gloo" else {})
    return rows


def bus_bandwidth(size_bytes: int, seconds: float, ranks: int) -> float:
    """Return bytes per second over the slowest link of a ring all-reduce, as nccl-tests counts it.

    Source: nccl-tests, doc/PERFORMANCE.md: size / time x 2 (n - 1) / n.
    """
    return size_bytes / seconds * 2 * (ranks - 1) / ranks


def _way(answers: Answers, interfaces: Mapping[str, str]) -> str:
    """Say over what the ranks talk: interfaces, and InfiniBand where there is some."""
    names = sorted({*interfaces.values()} - {""})
    infiniband = sorted({link for answer in answers.values() for link in answer["infiniband"]})
    kind = f"InfiniBand ({some_of(infiniband)})" if infiniband else "Ethernet"
    return f"over {', '.join(names) or 'an unknown interface'}, {kind}" if len(answers) > 1 else "within one machine"


def judge_links(links: Sequence[Sequence[Any]], promised: Mapping[str, float]) -> list[Row]:
    """Name the slowest link, and the hosts that are slow with everyone.

    Args:
        links: two hosts and bytes per second between them.
        promised: bytes per second by the host's interface; 0 where it does not say.
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
    slowest = min(links, key=lambda link: link[2])
    pair, speed = f"{slowest[0]} - {slowest[1]}", slowest[2]
    lowest = min((promised.get(host, 0.0) for host in slowest[:2]), default=0.0)
    if not rows and speed < PROMISED_SHARE * lowest:
        found = f"{pair}: {format_bytes(speed)}/s, the interface promises {format_bytes(lowest)}/s"
        rows.append(Row("links", "warning", found, _link_cure(f"{slowest[0]} or {slowest[1]}"), pair))
    return rows or [Row("links", "ok", f"slowest {pair}, {format_bytes(speed)}/s")]


def _link_cure(host: str) -> str:
    return f"look at cable, switch port and duplex of {host} (ethtool), and at what else sends there"


def judge_step(report: Mapping[str, Any], name: str, parameters: int, zero_stage: int) -> Row:
    """Tell how long a step's communication takes when nothing hides it.

    A step moves what `VOLUME_PER_PARAMETER` says; an all-reduce of as many values as the model has parameters moves
    2 for each, and its time is known.
    """
    size, seconds = report["large"]
    volume = VOLUME_PER_PARAMETER[zero_stage]
    gradients = FLOAT32_BYTES * parameters
    step = volume / VOLUME_OF_ALL_REDUCE * (gradients / size * seconds + report["small_seconds"])
    moved = format_bytes(volume * gradients)
    found = f"{name}: {moved} a rank and step, about {format_duration(step)} if nothing hides it"
    return Row("communication", "ok", found)
