"""Status, key figures, time, memory, events, settings and environment of a run, or of several side by side."""

from __future__ import annotations

import math
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zerovision.delivery.intervals import Interval, interval_of, wilson
from zerovision.delivery.pages import THIN, clip, count, date_and_time, join, number, percent, plural
from zerovision.delivery.report.run_files import History, RunFiles
from zerovision.training.base.errors import either
from zerovision.training.base.points import IN_EVERY_LINE, SCORE_NAMES, has_top5, score_in
from zerovision.training.base.units import format_bytes, format_duration
from zerovision.training.config import FIELDS, FLAG_OF, TrainConfig
from zerovision.training.config.values import OF_ONE_RUN, launch_command

LONGEST_REASON = 300
SILENT_SECONDS = 900.0  # a run that logs nothing for this long is reported as crashed
SPANS = {
    "data": "waiting for images",
    "forward": "the model and its loss",
    "backward": "gradients",
    "communication": "collectives, including waiting for late ranks",
    "optimizer": "the update",
    "logging": "scores, log files, console",
    "saving": "waiting for checkpoints",
    "other": "the rest of the loop",
    "evaluation": "the validation images",
}
MEANINGS = SPANS | {"restarting": "from the last logged line to the restart"}
MOST_RANKS = 64
RANKS_SHOWN_OF_MANY = 8
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
MOST_MARKS = 200  # of one kind on the timeline


class Status(NamedTuple):
    """A run's status: finished, diverged, stopped, gave up, running, crashed or not started, and an explanation."""

    word: str
    sentence: str

    @property
    def is_running(self) -> bool:
        """Whether the run is expected to log more lines."""
        return self.word in ("running", "not started")


class Fact(NamedTuple):
    """A key figure with a remark, or a setting with its default."""

    name: str
    value: str
    remark: str = ""
    default: str = ""
    differs: bool = False


class ShareRow(NamedTuple):
    """A row for a span of time or for a rank: the value as text, and its shares of the total and the largest value."""

    name: str
    meaning: str
    text: str
    share_of_total: float
    share_of_largest: float


class Breakdown(NamedTuple):
    """Rows that add up to a total, and remarks about the rows."""

    rows: list[ShareRow]
    total: str
    remarks: list[str]


def find_status(run: RunFiles, now: float | None = None) -> Status:
    """Return the status of a run at a Unix time in seconds, by default the current time."""
    history, epochs, best = run.history, run.config.get("epochs"), run.history.best_epoch
    done, end = max(history.epochs, default=0), history.processes[-1].end
    progress = f"epoch {done} of {epochs}" if done else "before the end of the first epoch"
    patience = run.config.get("early_stopping_patience") or 0
    stopped_early = bool(end is not None and best and 0 < patience <= done - best["epoch"])
    is_complete = bool(done) and done == epochs
    divergence = str(history.epochs[done].get("diverged") or "") if history.epochs else ""
    if (is_complete or stopped_early) and divergence:
        kept = f"the best epoch that did not diverge is {best['epoch']}" if best else "every epoch diverged"
        return Status("diverged", f"Diverged: after {progress} {clip(divergence, LONGEST_REASON)}; {kept}.")
    if is_complete:
        last_step = max(history.last_step, *(epoch["step"] for epoch in history.epochs.values()))
        return Status("finished", f"Finished: {plural(done, 'epoch')}, {plural(last_step, 'step')}.")
    if stopped_early:
        score = SCORE_NAMES.get(score_in(best)[0] if best else "top1", "the score")
        return Status("finished", f"Finished early after {progress}: {score} no longer improved.")
    if end is not None and history.last_kind != "resume":
        return Status("stopped", f"Stopped at step {count(end['step'])} ({progress}). It can be resumed.")
    if history.last_kind == "gave_up":
        line = history.events[-1]
        reason = clip(str(line.get("reason", "")), LONGEST_REASON)
        return Status("gave up", f"Gave up at step {count(int(line['step']))} ({progress}): {reason}")
    if history.last_time is None:
        return Status("not started", "Not started: nothing has been logged yet.")
    silence = max((time.time() if now is None else now) - history.last_time, 0.0)
    if silence <= SILENT_SECONDS:
        total = f" of {count(history.total_steps)}" if history.total_steps else ""
        return Status("running", f"Running: step {count(history.last_step)}{total}, {progress}.")
    return Status(
        "crashed",
        f"Crashed or killed: there is no end line; the last line is from {date_and_time(history.last_time)}, "
        f"{format_duration(silence)} before this page was written, at step {count(history.last_step)} ({progress}).",
    )


def describe(run: RunFiles) -> str:
    """Return a line with the model, data, strategy, number of ranks and precision of a run."""
    model, data, strategy = (clip(str(run.config.get(name, "?"))) for name in ("model_type", "data", "strategy"))
    facts = [f"{model} on {data}", strategy, _ranks(run), str(run.environment.get("precision", ""))]
    return ", ".join(fact for fact in facts if fact)


def command_of(run: RunFiles) -> str:
    """Return the command that repeats the run, or its original command if a setting belongs to a different version."""
    ranks, started_by = run.environment.get("ranks"), str(run.environment.get("command", ""))
    if not isinstance(ranks, int):
        return started_by
    try:
        config = TrainConfig(**run.config)
    except TypeError:
        return started_by
    return shlex.join(launch_command(config, ranks, run.environment.get("ranks_per_machine") or ranks, OF_ONE_RUN))


def key_figures(run: RunFiles) -> Iterator[Fact]:
    """Yield the scores of the best epoch, and the time, speed and memory of the run, if they are known."""
    yield from _scores(run)
    history, ranks = run.history, _ranks(run)
    spans = [process.spans() for process in history.processes]
    evaluation = sum(one.get("evaluation", 0.0) for one in spans)
    if training := sum(sum(one.values()) for one in spans) - evaluation:
        remark = f"and {format_duration(evaluation)} of evaluation" if evaluation else ""
        yield Fact("training time", format_duration(training), remark)
    if speed := _images_per_second(history):
        yield Fact("images per second", number(speed, 3), f"on {ranks}" if ranks else "")
    if peaks := history.memory_bytes_per_rank:
        remark = "highest of all ranks" if len(peaks) > 1 else "rank 0"
        yield Fact("peak memory", format_bytes(max(peaks)), remark)
    if line := history.pipeline:
        yield _pipeline(line)
    if rounds := [*history.rounds.values()]:
        numbers = Counter(line["islands"] for line in rounds)
        value = ", ".join(f"{islands} in {plural(count, 'round')}" for islands, count in sorted(numbers.items())[::-1])
        sent = format_bytes(sum(line["sent_bytes"] for line in rounds))
        yield Fact("islands", clip(value, LONGEST_REASON), f"rank 0 sent {sent} in outer steps")
    if search := run.batch_search:
        how = clip(str(search.get("how", "")), LONGEST_REASON)
        yield Fact("batch size found", str(search.get("batch_size", "?")), how)
    if total := run.parameters:
        value = f"{number(total / 1e6, 3)} million" if total >= 1e6 else count(total)
        yield Fact("weights", value, "numbers in model.safetensors")


def _pipeline(line: Mapping[str, Any]) -> Fact:
    """Return how evenly work is divided among the pipeline stages or ensemble members, and how long a rank waits."""
    shares, waited = ", ".join(percent(share, 0) for share in line["stage_shares"]), percent(line["wait_share"], 0)
    if "members" in line:
        members = clip(" | ".join(map(str, line["members"])), LONGEST_REASON)
        return Fact("ranks with members wait", waited, f"of a step; ranks have members {members}, and take {shares}")
    cuts = clip(", ".join(map(str, line.get("cuts", ()))), LONGEST_REASON)
    remark = f"of a step in this schedule; stages begin at the input, {cuts}, and take {shares}"
    return Fact("a pipeline's ranks wait", waited, remark)


def time_breakdown(history: History) -> Breakdown | None:
    """Return the time of each span, summed over all starts of a run; None if nothing was logged."""
    spans: dict[str, float] = dict.fromkeys(SPANS, 0.0)
    for process in history.processes:
        for name, value in process.spans().items():
            spans[name] = spans.get(name, 0.0) + value
    if any(process.follows_failure for process in history.processes):
        spans["restarting"] = sum(process.gap_seconds for process in history.processes if process.follows_failure)
    if not spans["evaluation"]:
        del spans["evaluation"]
    remarks = []
    if history.repeated_steps:
        remarks.append(
            f"This includes {plural(history.repeated_steps, 'step')} ({format_duration(history.repeated_seconds)}) of "
            "logged work that was repeated after restarts."
        )
    if any(process.end is None for process in history.processes):
        remarks.append("For a start without an end line, only logged intervals, evaluations and saves are counted.")
    return _breakdown(spans, format_duration, remarks) if sum(spans.values()) else None


def memory_breakdown(peaks: Sequence[int]) -> Breakdown | None:
    """Return the peak memory of each rank in bytes; with more than `MOST_RANKS` ranks, only the highest peaks."""
    if not peaks:
        return None
    ranks, remarks = list(range(len(peaks))), []
    if len(peaks) > MOST_RANKS:
        ranks = sorted(ranks, key=lambda rank: -peaks[rank])[:RANKS_SHOWN_OF_MANY]
        low, median, high = map(format_bytes, (min(peaks), statistics.median(peaks), max(peaks)))
        remarks = [
            f"{len(peaks)} ranks: the lowest peak is {low}, the median {median}, the highest {high}. "
            f"The {RANKS_SHOWN_OF_MANY} highest are shown."
        ]
    return _breakdown({f"rank {rank}": peaks[rank] for rank in ranks}, format_bytes, remarks)


def settings(run: RunFiles) -> list[Fact]:
    """Return the configuration, with non-default settings first."""
    facts = []
    for name, value in run.config.items():
        default = FIELDS[name].default if name in FIELDS else None
        shown = _show(default) if name in FIELDS else ""
        facts.append(Fact(FLAG_OF.get(name, name), _show(value), default=shown, differs=value != default))
    return sorted(facts, key=lambda fact: not fact.differs)


def environment_facts(run: RunFiles) -> list[Fact]:
    """Return the facts about a run's hardware, software versions and code."""
    environment = dict(run.environment)
    if "command" in environment:
        environment["started as"] = environment.pop("command")
    if isinstance(environment.get("memory_bytes"), int):
        environment["memory of the host"] = format_bytes(environment.pop("memory_bytes"))
    if "git_commit" in environment and environment.pop("git_has_changes", False):
        environment["git_commit"] = f"{environment['git_commit']}, with changes"
    return _flat(environment)


def side_by_side(runs: Sequence[Sequence[Any]]) -> list[tuple[str, list[Any]]]:
    """Return each name, in order of first appearance, with the row of every run; None for a run that lacks the name."""
    by_name = [{row.name: row for row in run} for run in runs]
    names = dict.fromkeys(name for rows in by_name for name in rows)
    return [(name, [rows.get(name) for rows in by_name]) for name in names]


def differences(runs: Sequence[Sequence[Fact]]) -> list[tuple[str, list[str]]]:
    """Return the names whose values differ, with the value of each run; '–' for a run that lacks the name."""
    values = [(name, [row.value if row else "–" for row in rows]) for name, rows in side_by_side(runs)]
    return [(name, row) for name, row in values if len(set(row)) > 1]


def _scores(run: RunFiles) -> Iterator[Fact]:
    """Yield the best epoch's scores, taken from the log only if there is no evaluation."""
    scores, test, best, found = run.scores, run.test_scores, run.history.best_epoch, run.calibration
    if scores:
        correct, epoch = round(scores["top1"] * scores["samples"]), scores.get("epoch", "?")
        images = f"{_interval(scores, 'top1')}; {count(correct)} of {plural(scores['samples'], 'image')}"
        top1, top5, loss = (scores[name] for name in ("top1", "top5", "loss"))
        shows_top5 = has_top5(scores)
    elif best:
        images, epoch = plural(int(best.get("val_samples", 0)), "image"), best["epoch"]
        top1, top5, loss = (best[name] for name in ("val_top1", "val_top5", "val_loss"))
        shows_top5 = True
    else:
        return
    yield Fact("top-1 accuracy", percent(top1, 2), f"{images}, epoch {epoch} of {run.config.get('epochs', '?')}")
    if shows_top5:
        yield Fact("top-5 accuracy", percent(top5, 2), _interval(scores, "top5"))
    yield Fact("validation loss", number(loss), "; ".join(filter(None, (_interval(scores, "loss"), "nats"))))
    if scores:
        yield Fact("calibration error", percent(scores["ece"], 2), "ECE, 15 bins")
    if found:
        facts = found.facts
        value = f"{percent(facts['ece_before'], 2)} → {percent(facts['ece'], 2)}"
        accuracy = "" if facts["accuracy"] is None else f", {percent(facts['accuracy'], 2)} of the others correct"
        kept = f"below {number(found.threshold)} none of these: {percent(1 - facts['coverage'], 2)} rejected{accuracy}"
        on = f"on {plural(facts['samples'], 'image')}, {facts['split']}"
        yield Fact("calibration error, calibrated", value, f"temperature {number(found.temperature)}; {kept}; {on}")
    name = run.config.get("best_by", "top1")
    if best and name not in IN_EVERY_LINE:  # the score by which the best epoch was chosen
        yield Fact(SCORE_NAMES.get(name, name), percent(score_in(best)[1], 2), _interval(scores, name))
    if classes := [one for one in scores["classes"] if one["support"]] if scores else []:
        lowest = min(classes, key=lambda one: one["recall"])
        interval = wilson(round(lowest["recall"] * lowest["support"]), lowest["support"])
        remark = f"{_brackets(interval)}; class {clip(str(lowest['name']), 40)}, {plural(lowest['support'], 'image')}"
        yield Fact("lowest recall", percent(lowest["recall"], 2), remark)
    if test:
        tested = f"{plural(test['samples'], 'image')}, evaluated once, after epoch {test.get('epoch', '?')}"
        yield Fact("test top-1 accuracy", percent(test["top1"], 2), f"{_interval(test, 'top1')}; {tested}")


def _interval(scores: Mapping[str, Any] | None, name: str) -> str:
    """Return the interval of a score in brackets; '' if the score has no interval."""
    return _brackets(interval_of(scores, name), is_share=name != "loss") if scores else ""


def _brackets(interval: Interval | None, *, is_share: bool = True) -> str:
    if interval is None:
        return ""
    low, high = (f"{100 * end:.2f}" if is_share else number(end) for end in interval)
    return f"95{THIN}% interval [{low}, {high}]"


def _images_per_second(history: History) -> float | None:
    """Return the speed from the `end` line if the run was started once, and otherwise from the logged intervals."""
    end = history.processes[-1].end or {}
    if len(history.processes) == 1 and isinstance(end.get("images_per_second"), float):
        return end["images_per_second"]
    return history.logged_images / history.logged_seconds if history.logged_seconds else None


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value in ("", []):
        return "(empty)" if value == "" else "none"
    return ", ".join(map(_show, value)) if isinstance(value, list) else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[Fact]:
    """Return a row for each value, named by its path without repetition: `model.model_type` becomes "model type"."""
    rows = []
    for key, value in values.items():
        name = str(key).replace("_", " ")
        name = name if name.startswith(f"{prefix} ") else f"{prefix} {name}".strip()
        rows += _flat(value, name) if isinstance(value, dict) else [Fact(name, _show(value))]
    return rows


def _ranks(run: RunFiles) -> str:
    ranks = run.environment.get("ranks")
    return plural(ranks, "rank") if isinstance(ranks, int) else ""


def _breakdown(values: Mapping[str, float], text: Callable[[float], str], remarks: list[str]) -> Breakdown:
    total, largest = sum(values.values()) or 1, max(values.values()) or 1
    rows = [
        ShareRow(name, MEANINGS.get(name, ""), text(one), one / total, one / largest) for name, one in values.items()
    ]
    return Breakdown(rows, text(total), remarks)


def find_incidents(history: History) -> dict[str, Any]:
    """Return the events in the order in which they were logged, with a `summary` of a few sentences.

    `rows` are (time since the first line, step, kind, details); `lanes` of a timeline are (name, positions in percent).
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
            f"the background; training waited {format_duration(stalls)} for them in total."
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
            who = f"rank {line['rank']}" + (f" (host {clip(str(line['host']))})" if line.get("host") else "")
            return "slow rank", f"{who}: {own} ms of work per step, {others} ms in the other ranks (median)"
        case "wrong_gradient":
            places = zip(line["ranks"], line["hosts"], strict=True)
            who = either(f"rank {rank} (host {clip(str(host))})" for rank, host in places)
            return "wrong gradient", clip(f"{who}, first in {line['parameters'][0]}", LONGEST_TEXT)
        case "checkpoint_failed":
            return "failed checkpoint", clip(f"{line.get('name', '?')}: {line.get('error', '?')}", LONGEST_TEXT)
        case "diverged":
            return "diverged", clip(f"epoch {line.get('epoch', '?')}: {line.get('reason', '?')}", LONGEST_TEXT)
        case _:
            return "gave up", clip(str(line.get("reason", "?")), LONGEST_TEXT)
