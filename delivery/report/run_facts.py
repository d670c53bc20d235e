"""The figures of a run that one looks for first, its settings, and what it was made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from delivery.report.formatting import clip, count, number, percent, plural, seconds, size
from delivery.report.run_files import RunFiles
from delivery.reproduce_command import reproduce_command
from training.config import FIELDS, FLAG_OF, TrainConfig


@dataclass(frozen=True)
class Figure:
    """A key figure: what it is, its value, and a few words about it."""

    name: str
    value: str
    remark: str = ""


@dataclass(frozen=True)
class Setting:
    """A setting of a run, or something that it was made with."""

    name: str
    value: str
    default: str = ""
    differs: bool = False


def describe(run: RunFiles) -> str:
    """Return in a line what was trained, on what, and how."""
    config, environment = run.config, run.environment
    data, model, strategy = (str(config.get(name, "?")) for name in ("data", "model_type", "strategy"))
    words = [f"{clip(model)} on {clip(data)}", clip(strategy), _ranks(run), str(environment.get("precision", ""))]
    return ", ".join(word for word in words if word)


def command_to_repeat(run: RunFiles) -> str:
    """Return the line that trains the run again; as it was started where a setting is of another version."""
    ranks, started_as = run.environment.get("ranks"), str(run.environment.get("command", ""))
    if not isinstance(ranks, int):
        return started_as
    try:
        return reproduce_command(TrainConfig(**run.config), ranks, run.environment.get("ranks_per_machine") or ranks)
    except TypeError:
        return started_as


def key_figures(run: RunFiles) -> list[Figure]:
    """Return the figures of the best epoch, of speed and of memory, as far as they are known."""
    figures = _scores(run)
    history = run.history
    training, evaluation = total_seconds(run)
    if training:
        remark = f"and {seconds(evaluation)} of evaluation" if evaluation else ""
        figures.append(Figure("training time", seconds(training), remark))
    if speed := mean_speed(run):
        figures.append(Figure("images per second", number(speed, 3), f"on {_ranks(run)}" if _ranks(run) else ""))
    if peaks := history.memory_bytes_per_rank:
        remark = "highest of all ranks" if len(peaks) > 1 else "rank 0"
        figures.append(Figure("peak memory", size(max(peaks)), remark))
    if run.parameters:
        figures.append(Figure("weights", _millions(run.parameters), "numbers in model.safetensors"))
    return figures


def total_seconds(run: RunFiles) -> tuple[float, float]:
    """Return the seconds of training, and of evaluation, over all starts of the run."""
    spans = [process.spans() for process in run.history.processes]
    evaluation = sum(one.get("evaluation", 0.0) for one in spans)
    return sum(sum(one.values()) for one in spans) - evaluation, evaluation


def mean_speed(run: RunFiles) -> float | None:
    """Return images per second: as the run itself says at its end, else over its logged intervals."""
    history = run.history
    end = history.processes[-1].end
    if len(history.processes) == 1 and end is not None and isinstance(end.get("images_per_second"), float):
        return end["images_per_second"]
    return history.logged_images / history.logged_seconds if history.logged_seconds else None


def settings(run: RunFiles) -> list[Setting]:
    """Return the configuration, what differs from the defaults first."""
    rows = []
    for name, value in run.config.items():
        known = name in FIELDS
        default = FIELDS[name].default if known else None
        rows.append(Setting(FLAG_OF.get(name, name), show(value), show(default) if known else "", value != default))
    return sorted(rows, key=lambda row: not row.differs)


def surroundings(run: RunFiles) -> list[Setting]:
    """Return hardware, versions and code of a run."""
    environment = dict(run.environment)
    if "command" in environment:
        environment["started as"] = environment.pop("command")
    if "memory_bytes" in environment and isinstance(environment["memory_bytes"], int):
        environment["memory of the host"] = size(environment.pop("memory_bytes"))
    if "git_commit" in environment and environment.pop("git_has_changes", False):
        environment["git_commit"] = f"{environment['git_commit']}, with changes"
    return [Setting(name, value) for name, value in _flat(environment)]


def show(value: Any) -> str:
    """Write a value of JSON for people."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or value in ("", []):
        return "(empty)" if value == "" else "none"
    return ", ".join(map(show, value)) if isinstance(value, list) else str(value)


def _scores(run: RunFiles) -> list[Figure]:
    scores, best = run.scores, run.history.best_epoch
    epochs = run.config.get("epochs", "?")
    if scores is not None:
        right = sum(cell[2] for cell in scores["confusion"] if cell[0] == cell[1])
        where = f"{count(right)} of {plural(scores['samples'], 'image')}, epoch {scores.get('epoch', '?')} of {epochs}"
        return [
            Figure("top-1 accuracy", percent(scores["top1"], 2), where),
            Figure("top-5 accuracy", percent(scores["top5"], 2)),
            Figure("validation loss", number(scores["loss"]), "cross-entropy in nats"),
            Figure("calibration error", percent(scores["ece"], 2), "ECE, 15 bins"),
        ]
    if best is None:
        return []
    where = f"{plural(int(best.get('val_samples', 0)), 'image')}, epoch {best['epoch']} of {epochs}"
    return [
        Figure("top-1 accuracy", percent(best["val_top1"], 2), where),
        Figure("top-5 accuracy", percent(best["val_top5"], 2)),
        Figure("validation loss", number(best["val_loss"]), "cross-entropy in nats"),
    ]


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Return a row for each value, named by the path to it; `model_type` of `model` is named once."""
    rows = []
    for key, value in values.items():
        words = str(key).replace("_", " ")
        name = words if words.startswith(f"{before} ") else f"{before} {words}".strip()
        rows += _flat(value, name) if isinstance(value, dict) else [(name, show(value))]
    return rows


def _ranks(run: RunFiles) -> str:
    ranks = run.environment.get("ranks")
    return plural(ranks, "rank") if isinstance(ranks, int) else ""


def _millions(value: int) -> str:
    return f"{number(value / 1e6, 3)} million" if value >= 1e6 else count(value)
