"""The events of a run: restarts, skipped steps, slow ranks, checkpoints."""

from __future__ import annotations

import math
import statistics
from typing import Any

from zerovision.delivery.pages import clip, date_and_time, join, number, plural
from zerovision.delivery.report.run_files import History
from zerovision.training.base.units import format_duration

MOST_ROWS = 40
LONGEST_TEXT = 200
LANES = {
    "resume": "restarts",
    "skipped_step": "skipped steps",
    "wrong_gradient": "wrong gradients",
    "slow_rank": "slow ranks",
    "diverged": "diverged",
    "checkpoint": "checkpoints",
}
MOST_MARKS = 200  # of one kind on the time line


def find_incidents(history: History) -> dict[str, Any]:
    """Return the events in the order in which they were logged.

    Returns:
        `summary`, a few sentences; `rows` of (time since the first line, step, kind, details); the number of rows that
        are `left_out`; `lanes` of a time line as (name, positions in percent of the steps).
    """
    start = history.first_time or 0.0
    rows = [
        (f"+{format_duration(max(float(line['time']) - start, 0.0))}", int(line["step"]), *_describe(line))
        for line in history.events[:MOST_ROWS]
    ]
    last = max([history.last_step, 1, *(int(line["step"]) for line in history.events)])
    lanes = []
    for kind, name in LANES.items():
        lines = [line for line in (*history.events, *history.checkpoints) if line["kind"] == kind]
        if lines:
            every = math.ceil(len(lines) / MOST_MARKS)
            lanes.append((name, [round(100 * int(line["step"]) / last, 2) for line in lines[::every]]))
    left_out = len(history.events) - len(rows)
    return {"summary": _summarize(history), "rows": rows, "left_out": left_out, "lanes": lanes}


def _summarize(history: History) -> list[str]:
    if history.first_time is None or history.last_time is None:
        return ["Nothing has been logged."]
    kinds = [line["kind"] for line in history.events]
    counts = [
        plural(kinds.count("resume"), "resume"),
        plural(kinds.count("skipped_step"), "skipped step"),
        plural(kinds.count("wrong_gradient"), "wrong gradient"),
        plural(kinds.count("slow_rank"), "warning") + " of a slow rank",
        plural(kinds.count("checkpoint_failed"), "failed checkpoint"),
        plural(kinds.count("diverged"), "diverged epoch"),
    ]
    found = join([text for text in counts if not text.startswith("0")])
    sentences = [f"{found}." if found else "No restart, no skipped step, no slow rank."]
    if history.checkpoints:
        stalls = sum(float(line.get("stall_seconds", 0.0)) for line in history.checkpoints)
        writing = statistics.median(float(line.get("seconds", 0.0)) for line in history.checkpoints)
        sentences.append(
            f"{plural(len(history.checkpoints), 'checkpoint')}, each written in {format_duration(writing)} (median) in "
            f"the background; training waited {format_duration(stalls)} for them in all."
        )
    return [*sentences, f"From {date_and_time(history.first_time)} to {date_and_time(history.last_time)}."]


def _describe(line: dict[str, Any]) -> tuple[str, str]:
    """Return the kind of an incident, and its details."""
    match line["kind"]:
        case "resume":
            restarts = int(line.get("restarts", 0))
            by = f"restart {restarts} of the launcher" if restarts else "by hand"
            return "resumed", f"from {clip(str(line.get('checkpoint', '?')))}, {by}"
        case "skipped_step":
            samples = [str(name) for name in line.get("samples") or []]
            among = f", among {join(samples[:3])}{' and more' if len(samples) > 3 else ''}" if samples else ""
            culprit = str(line.get("culprit", "the gradient"))
            details = f"{culprit} was not finite ({line.get('in_row', 1)} in a row{among})"
            return "skipped step", clip(details, LONGEST_TEXT)
        case "slow_rank":
            own, others = (number(1000 * float(line[key]), 3) for key in ("step_seconds", "others_step_seconds"))
            host = f" (host {clip(str(line['host']))})" if line.get("host") else ""
            return "slow rank", f"rank {line['rank']}{host}: {own} ms of work per step, the others {others} ms (median)"
        case "wrong_gradient":
            places = zip(line["ranks"], line["hosts"], strict=True)
            who = " or ".join(f"rank {rank} (host {clip(str(host))})" for rank, host in places)
            return "wrong gradient", clip(f"{who}, first in {line['parameters'][0]}", LONGEST_TEXT)
        case "checkpoint_failed":
            return "failed checkpoint", clip(f"{line.get('name', '?')}: {line.get('error', '?')}", LONGEST_TEXT)
        case "diverged":
            return "diverged", clip(f"epoch {line.get('epoch', '?')}: {line.get('reason', '?')}", LONGEST_TEXT)
        case _:
            return "gave up", clip(str(line.get("reason", "?")), LONGEST_TEXT)
