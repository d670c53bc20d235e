"""The observers of a run; to add an observer, write it in a new file and add a line here."""

from __future__ import annotations

import dataclasses
from typing import Any

from zerovision.training.base.heartbeat import HeartbeatWriter
from zerovision.training.engines.engine import Averages
from zerovision.training.observe.observer import Observer, Observers, Seen, StepDone
from zerovision.training.observe.sample_history import MOST_IMAGES, SampleHistory
from zerovision.training.observe.step_hashes import StepHashes
from zerovision.training.steps.audit import Audited
from zerovision.training.steps.carrier import Run
from zerovision.training.steps.nonfinite_steps import NonFiniteGuard
from zerovision.training.steps.saver import Saver
from zerovision.training.steps.step_metrics import StepMetrics
from zerovision.training.tasks.scores import ScoreSums


class EpochSums(Observer):
    """Adds up the scores of the steps of an epoch whose updates were applied."""

    def __init__(self, sums: ScoreSums) -> None:
        self._sums, self._before = sums, sums.state()

    def before_step(self, position: int) -> None:
        self._before = self._sums.state()

    def seen(self, seen: Seen) -> None:
        self._sums.add(seen.losses, seen.logits, seen.batch.labels, seen.batch.weights)

    def after_step(self, done: StepDone) -> None:
        self._sums.keep_if(done.applied, self._before)


class WeightUpdates(Observer):
    """Updates the averages of the weights after each step."""

    span = "optimizer"

    def __init__(self, averages: Averages) -> None:
        self._averages = averages

    def after_step(self, done: StepDone) -> None:
        self._averages.after_step(done.applied, done.position + 1)


class Heartbeats(Observer):
    """Sends the launcher a heartbeat for each step."""

    span = "logging"

    def __init__(self, heartbeat: HeartbeatWriter) -> None:
        self._heartbeat = heartbeat

    def after_step(self, done: StepDone) -> None:
        self._heartbeat.beat("step", done.position + 1)


def watched(run: Run, identity: dict[str, Any]) -> tuple[Run, Saver]:
    """Add the observers to a built run, and return the run and its saver (`identity`: see `Manifest`); a collective."""
    config, data, steps_per_epoch = run.config, run.data, run.plan.steps_per_epoch
    guard = guard_of(run, config.max_bad_steps)
    saver, observers = Saver(run, identity, guard), every_step(run, guard)
    if config.log_hashes:
        observers.append(StepHashes(config.log_hashes, run.world, run.plan.leaves, run.state.engine, run.loggers))
    if data.sets is None and not config.embedding and config.features != "cached" and len(data.train) <= MOST_IMAGES:
        observers.append(SampleHistory(run.folder.path, run.world, config.epochs, steps_per_epoch))
    if config.profile and run.world.is_main:
        from zerovision.training.observe.profiler import StepProfiler

        folder = run.folder.path / "profile"
        observers.append(StepProfiler(config.profile, steps_per_epoch, folder, run.clock, run.loggers))
    observers += [Heartbeats(run.start.heartbeat), saver]
    run = dataclasses.replace(run, observers=Observers(observers, run.clock))
    if config.audit:
        leaves = run.plan.accumulation_steps
        step = Audited(run.step, config.audit, run.world, leaves, lambda: run.position, run.loggers)
        run = dataclasses.replace(run, step=step)
    return run, saver


def guard_of(run: Run, most_consecutive: int) -> NonFiniteGuard:
    """Return the guard that undoes a run's non-finite steps."""
    name_of = run.data.train.source.name
    return NonFiniteGuard(run.state, run.world.data, run.loggers, most_consecutive, name_of)


def every_step(run: Run, guard: NonFiniteGuard) -> list[Observer]:
    """Return the observers that every run has, in the order in which they process a step; a collective."""
    return [guard, EpochSums(run.state.sums), WeightUpdates(run.model.averages), StepMetrics(run, guard)]
