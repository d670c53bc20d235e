"""Everything that happens around the steps of an epoch: measuring, logging, guarding, saving and stopping."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from zerovision.training.checkpoint.restore import TrainState
from zerovision.training.data.reader import Batch
from zerovision.training.engines.engine import StepResult, TimedEngine
from zerovision.training.observe.step_hashes import HASHES, StepHashes
from zerovision.training.observe.step_metrics import StepMetrics
from zerovision.training.steps.context import TrainContext
from zerovision.training.world.collectives import gather_objects
from zerovision.training.world.signals import StopDecision

STEPS_BETWEEN_POLLS = (
    10  # of groups that train apart, whose link may take longer than a step: nothing waits for a poll until the next
)


@dataclass(frozen=True)
class EpochResult:
    """Measurements of one epoch of training; `stop_signal`, as of `StopRequest.poll`, is 0 unless it ended early."""

    seconds: float
    images_per_second: float
    data_wait_share: float
    stop_signal: int


class EpochObserver:
    """Observes the steps of one epoch on this rank, and decides with the other ranks when to save and to stop."""

    def __init__(self, state: TrainState, context: TrainContext) -> None:
        """Observe from `state.progress.step` on."""
        self._state, self._context, self._guard = state, context, context.guard
        self._clock, self._profiler = context.timing.clock, context.timing.profiler
        self.timed_engine = TimedEngine(state.engine, self._clock)
        self._metrics = StepMetrics(context, state.progress.epoch, state.sums)
        world = context.world
        is_whole = world.replica.size == 1  # else gradients are of a part of the network
        self._hashes = StepHashes(
            context.log_hashes, world, context.plan.leaves, state.engine.module if is_whole else None
        )
        self._first_step = state.progress.step
        self._sums_before = state.sums.state()
        self._stop_signal = 0
        if self._profiler is not None:
            self._profiler.begin_epoch(context.plan.steps_per_epoch - self._first_step)

    def before_step(self) -> int:
        """Keep what a skipped step must not change, and return how many steps of the run precede this one."""
        self._guard.before_step()
        self._sums_before = self._state.sums.state()
        position = self._context.plan.position(self._state.progress)
        self._hashes.before_step(position)
        return position

    def note(
        self, batch: Batch, losses: torch.Tensor, logits: torch.Tensor, evidence: torch.Tensor | None = None
    ) -> None:
        """As `zerovision.training.engines.engine.Note`."""
        self._state.sums.add(losses, logits, batch.labels, batch.weights)
        self._guard.note(batch, losses if evidence is None else evidence)
        if self._context.history is not None:
            self._context.history.add(batch, logits, self._state.progress.epoch)
        self._hashes.note(batch.images, logits, self._context.plan.position(self._state.progress))

    def after_step(self, result: StepResult | None, *, failure: int) -> bool:
        """Count, log and save; return whether all ranks stop here. A collective.

        Args:
            result: what the engine returned after the last micro-step.
            failure: why this rank cannot go on, as of `StopRequest.poll`; 0 if it can.

        Raises:
            RunEnded: on all ranks, if the run cannot go on.
        """
        state, context = self._state, self._context
        position = context.plan.position(state.progress)
        applied = self._guard.after_step(result, position + 1)
        state.sums.keep_if(applied, self._sums_before)
        if context.averages is not None:
            with self._clock.optimizer:
                context.averages.after_step(applied, position + 1)
        state.progress = dataclasses.replace(state.progress, step=state.progress.step + 1)
        with self._clock.logging:
            self._metrics.after_step(position, result)
            if hashes := self._hashes.after_step(state.engine, position):
                context.loggers.event(HASHES, hashes)
            context.heartbeat.beat("step", position + 1)
        if self._profiler is not None:
            self._profiler.after_step()
        verdict = StopDecision(0, False)
        if position % min(context.local_steps, STEPS_BETWEEN_POLLS) == 0:
            is_due = context.saver is not None and context.saver.is_due_by_time()
            verdict = context.stop.poll(context.world, failure=failure, save_due=is_due)
        self._stop_signal = verdict.stop_signal
        if not (self._stop_signal or state.progress.step == context.plan.steps_per_epoch):
            self._save_if_due(position + 1, failure, is_due_by_time=verdict.save_due)
        elif self._profiler is not None:
            self._profiler.end_epoch()
        return bool(self._stop_signal)

    def finish(self) -> EpochResult:
        """Settle what is still on the device and return what was measured; a collective.

        Raises:
            RunEnded: on all ranks, if the run cannot go on.
        """
        self._settle()
        seconds = self._metrics.elapsed_seconds()
        if self._context.history is not None:
            with self._clock.logging:
                self._context.history.write(self._state.progress.epoch)
        images = self._context.plan.images(self._first_step, self._state.progress.step)
        return EpochResult(seconds, images / seconds, self._metrics.data_wait_share, self._stop_signal)

    def _save_if_due(self, position: int, failure: int, *, is_due_by_time: bool) -> None:
        """Save, unless a rank cannot go on: this step has then empty batches, and the stop comes after the next."""
        saver = self._context.saver
        if saver is None:
            return
        with self._clock.saving:
            saver.note_outcome()
            if is_due_by_time or saver.is_due_by_steps(position):
                self._settle()
                if any(gather_objects(bool(failure), self._context.world)):
                    saver.wait()  # for the one before
                else:
                    saver.save()

    def _settle(self) -> None:
        """Read the pending verdicts on the last steps, and take their counts into the progress; a sync."""
        self._guard.settle()
        self._state.progress = dataclasses.replace(
            self._state.progress, skipped_steps=self._guard.skipped, bad_steps_in_row=self._guard.consecutive
        )
