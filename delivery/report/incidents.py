"""What happened on the way: restarts, skipped steps, slow ranks and links, checkpoints."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from delivery.report.formatting import clip, listing, moment, number, plural, seconds
from delivery.report.history import History

MOST_ROWS = 40
LONGEST_TEXT = 200
LANES = {
    "resume": "restarts",
    "skipped_step": "skipped steps",
    "slow_rank": "slow ranks",
    "slow_link": "slow links",
    "diverged": "diverged",
}
MOST_MARKS = 200  # of one kind on the time line


@dataclass(frozen=True)
class Incident:
    """A row of the table of incidents: when, at which step, and what it was."""

    when: str
    step: int
    kind: str
    words: str


@dataclass(frozen=True)
class Incidents:
    """All that happened beside training itself.

    Attributes:
        summary: a sentence or two.
        rows: the first incidents.
        left_out: how many more there are.
        lanes: (name, places in percent of the run's steps) for a time line.
    """

    summary: list[str]
    rows: list[Incident]
    left_out: int
    lanes: list[tuple[str, list[float]]]


def find_incidents(history: History) -> Incidents:
    """Return what happened in the order it happened."""
    start = history.first_time or 0.0
    rows = [
        Incident(f"+{seconds(max(float(line['time']) - start, 0.0))}", int(line["step"]), *_KINDS[line["kind"]](line))
        for line in history.events[:MOST_ROWS]
    ]
    last = max([history.last_step, 1, *(int(line["step"]) for line in history.events)])
    lanes = []
    for kind, name in LANES.items():
        steps = [int(line["step"]) for line in history.events if line["kind"] == kind]
        if steps:
            lanes.append((name, _spread([100 * step / last for step in steps])))
    if history.checkpoints:
        lanes.append(("checkpoints", _spread([100 * int(line["step"]) / last for line in history.checkpoints])))
    return Incidents(_summary(history), rows, len(history.events) - len(rows), lanes)


def _summary(history: History) -> list[str]:
    kinds = [line["kind"] for line in history.events]
    found = [
        plural(kinds.count("resume"), "resume"),
        plural(kinds.count("skipped_step"), "skipped step"),
        plural(kinds.count("slow_rank"), "warning") + " of a slow rank",
        plural(kinds.count("slow_link"), "warning") + " of a slow link",
        plural(kinds.count("checkpoint_failed"), "failed checkpoint"),
        plural(kinds.count("diverged"), "diverged epoch"),
    ]
    if history.last_time is None:
        return ["Nothing is known of what happened."]
    happened = [words for words in found if not words.startswith("0")]
    sentences = (
        [f"{listing(happened)}."] if happened else ["Nothing went wrong: no restart, no skipped step, no slow rank."]
    )
    if history.checkpoints:
        stalls = sum(float(line.get("stall_seconds", 0.0)) for line in history.checkpoints)
        writing = statistics.median(float(line.get("seconds", 0.0)) for line in history.checkpoints)
        sentences.append(
            f"{plural(len(history.checkpoints), 'checkpoint')}, written in {seconds(writing)} each (median) beside "
            f"the training, which stood still for {seconds(stalls)} in all."
        )
    if history.first_time is not None:
        sentences.append(f"From {moment(history.first_time)} to {moment(history.last_time)}.")
    return sentences


def _spread(places: list[float]) -> list[float]:
    """Keep at most so many marks, evenly chosen."""
    every = -(-len(places) // MOST_MARKS)
    return [round(place, 2) for place in places[::every]]


def _resume(line: dict[str, Any]) -> tuple[str, str]:
    restarts = int(line.get("restarts", 0))
    who = f"restart {restarts} of the launcher" if restarts else "by hand"
    return "resumed", f"from {clip(str(line.get('checkpoint', '?')))}, {who}"


def _skipped(line: dict[str, Any]) -> tuple[str, str]:
    samples = [str(name) for name in line.get("samples") or []]
    among = f", among {listing(samples[:3])}{' and more' if len(samples) > 3 else ''}" if samples else ""
    culprit = str(line.get("culprit", "the gradient")).removesuffix(" is")  # as it was written at first
    words = f"{culprit} was not finite ({line.get('in_row', 1)} in a row{among})"
    return "skipped step", clip(words, LONGEST_TEXT)


def _slow(line: dict[str, Any]) -> tuple[str, str]:
    own, others = (number(1000 * float(line[key]), 3) for key in ("step_seconds", "others_step_seconds"))
    host = f" (host {clip(str(line['host']))})" if line.get("host") else ""
    return "slow rank", f"rank {line['rank']}{host}: {own} ms of work a step, the others {others} ms (median)"


def _slow_link(line: dict[str, Any]) -> tuple[str, str]:
    hosts = [str(host) for host in line["hosts"]]
    who = f"with host {hosts[0]}" if len(hosts) == 1 else f"between {listing(hosts)}"
    share = number(100 * float(line["communication_share"]), 2)
    probe = number(1000 * float(line["probe_seconds"]), 3)
    words = f"the exchange {who} takes {share} % of a step; a small message there and back {probe} ms"
    return "slow link", clip(words, LONGEST_TEXT)


def _failed(line: dict[str, Any]) -> tuple[str, str]:
    return "failed checkpoint", clip(f"{line.get('name', '?')}: {line.get('error', '?')}", LONGEST_TEXT)


def _diverged(line: dict[str, Any]) -> tuple[str, str]:
    return "diverged", clip(f"epoch {line.get('epoch', '?')}: {line.get('reason', '?')}", LONGEST_TEXT)


def _gave_up(line: dict[str, Any]) -> tuple[str, str]:
    return "gave up", clip(str(line.get("reason", "?")), LONGEST_TEXT)


_KINDS: dict[str, Callable[[dict[str, Any]], tuple[str, str]]] = {
    "resume": _resume,
    "skipped_step": _skipped,
    "slow_rank": _slow,
    "slow_link": _slow_link,
    "checkpoint_failed": _failed,
    "diverged": _diverged,
    "gave_up": _gave_up,
}
