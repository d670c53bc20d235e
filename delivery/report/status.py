"""Says whether a run is going on, has finished, was stopped, or broke off."""

from __future__ import annotations

import time
from dataclasses import dataclass

from delivery.report.formatting import clip, count, moment, plural, seconds
from delivery.report.history import History
from delivery.report.run_files import RunFiles

LONGEST_REASON = 300
PATIENCE_SECONDS = 900.0  # without a line in metrics.jsonl; longer where the run itself was silent for longer


@dataclass(frozen=True)
class Status:
    """Where a run stands.

    Attributes:
        word: one of finished, diverged, stopped, gave up, going on, broken off, not begun.
        sentence: the same with numbers.
        is_going_on: whether more is to come.
    """

    word: str
    sentence: str
    is_going_on: bool = False


def find_status(run: RunFiles, now: float | None = None) -> Status:
    """Say where a run stands.

    Args:
        run: what its folder holds.
        now: Unix seconds, by default of this moment.
    """
    history, epochs = run.history, run.config.get("epochs")
    silence = max((time.time() if now is None else now) - (history.last_time or 0.0), 0.0)
    end = history.processes[-1].end
    done = max(history.epochs, default=0)
    where = f"epoch {done} of {epochs}" if done else "before the first epoch was done"
    has_finished = bool(done and done == epochs) or (end is not None and _is_out_of_patience(run))
    if has_finished and history.divergence:
        sound = f"the best sound epoch is {history.best_epoch['epoch']}" if history.best_epoch else "no epoch was sound"
        return Status("diverged", f"Diverged: after {where} {clip(history.divergence, LONGEST_REASON)}; {sound}.")
    if done and done == epochs:
        return Status("finished", f"Finished: {plural(done, 'epoch')}, {plural(_steps(history), 'step')}.")
    if end is not None and _is_out_of_patience(run):
        return Status("finished", f"Finished early after {where}: top-1 did not get better any more.")
    if end is not None:
        return Status("stopped", f"Stopped at step {count(int(end['step']))} ({where}). It can be resumed.")
    if history.last_kind == "gave_up":
        line = history.events[-1]
        reason = clip(str(line.get("reason", "")), LONGEST_REASON)
        return Status("gave up", f"Gave up at step {count(int(line['step']))} ({where}): {reason}")
    if history.last_time is None:
        return Status("not begun", "Not begun: nothing has been logged yet.", is_going_on=True)
    if silence <= PATIENCE_SECONDS:
        total = f" of {count(history.total_steps)}" if history.total_steps else ""
        return Status("going on", f"Going on: step {count(history.last_step)}{total}, {where}.", is_going_on=True)
    return Status(
        "broken off",
        f"Broken off: the last sign is from {moment(history.last_time)}, {seconds(silence)} before this page was "
        f"written, at step {count(history.last_step)} ({where}). The end of the run is not in metrics.jsonl.",
    )


def _steps(history: History) -> int:
    return max(history.last_step, *(int(epoch["step"]) for epoch in history.epochs.values()))


def _is_out_of_patience(run: RunFiles) -> bool:
    patience, best = run.config.get("early_stopping_patience") or 0, run.history.best_epoch
    return bool(best and 0 < patience <= max(run.history.epochs) - best["epoch"])
