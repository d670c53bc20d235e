"""The loop itself: one epoch of training, one pass of evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from training.bad_images import check_bad_images
from training.bad_steps import StepGuard
from training.checkpoint.manifest import Progress
from training.checkpoint.saver import Saver
from training.data.loader import Batch, EvaluationLoader
from training.data.sampler import BatchPlan
from training.distributed import World, error_on_any_rank
from training.engine import Engine
from training.errors import AgreedError, UserError
from training.launch_folder import RankReport
from training.loggers import Loggers
from training.meter import Meter, Timing
from training.metrics import SampleRecorder, Scores, ScoreSums, sample_losses
from training.optim import Schedule
from training.signals import StopRequest


@dataclass(frozen=True)
class LoopSettings:
    """What stays the same over all epochs of a run."""

    plan: BatchPlan
    schedule: Schedule
    num_classes: int
    image_size: int
    seed: int
    label_smoothing: float
    log_every_steps: int
    epochs: int

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.epochs * self.plan.steps_per_epoch


@dataclass(frozen=True)
class LoopTools:
    """What the loop calls on its way; the same over all epochs of a run."""

    world: World
    loggers: Loggers
    stop: StopRequest
    guard: StepGuard
    report: RankReport
    saver: Saver | None = None
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True)
class EpochResult:
    """What one epoch of training did; `stop_signal` is 0 unless a signal asked for its end."""

    progress: Progress
    seconds: float
    images_per_second: float
    data_wait_share: float
    stop_signal: int


def train_one_epoch(
    engine: Engine,
    batches: Iterable[Batch],
    settings: LoopSettings,
    progress: Progress,
    sums: ScoreSums,
    tools: LoopTools,
) -> EpochResult:
    """Train from where `progress` stands to the epoch's end, or to a stop signal.

    A collective: all ranks run the same steps, and all stop after the same one.

    Args:
        engine: the model and its optimizer.
        batches: this rank's micro-batches on its device, from `progress.step` on.
        settings: what stays the same.
        progress: epoch and first step.
        sums: the epoch's sums; skipped steps are not in them.
        tools: what the loop calls.

    Raises:
        UserError: on all ranks, where an image on any rank cannot be read.
        RunEnded: on all ranks, where the run cannot go on.
    """
    plan, world, guard, clock = settings.plan, tools.world, tools.guard, tools.timing.clock
    meter = Meter(settings, progress.epoch, sums, world, tools.loggers, tools.timing, guard)
    waiting = _SafeBatches(batches, (plan.steps_per_epoch - progress.step) * plan.accumulation_steps, settings, world)
    first_step, stop_signal = progress.step, 0
    profiler = tools.timing.profiler
    if profiler is not None:
        profiler.begin_epoch(plan.steps_per_epoch - first_step)
    for step in range(first_step, plan.steps_per_epoch):
        position = progress.epoch * plan.steps_per_epoch + step
        for group in engine.parameter_groups:
            group["lr"] = settings.schedule.group_learning_rate(position, group["rate_scale"])
        loss_factor = plan.loss_scale_for(step)
        guard.before_step()
        sums_before = sums.state()
        result = None
        for micro_step in range(plan.accumulation_steps):
            with clock.data:
                batch = next(waiting)
            _seed_dropout(settings.seed, position, micro_step * world.size + world.rank, world.device)
            with clock.forward:
                logits = engine.forward(batch.images)
                losses = sample_losses(logits, batch.labels, settings.label_smoothing)
                loss = (losses * batch.weights).sum() * loss_factor
            with clock.backward:
                engine.backward(loss)
            with clock.optimizer:
                result = engine.step()
            with clock.logging:
                sums.add(losses, logits, batch.labels, batch.weights)
            guard.note(batch, losses)
        sums.keep_if(guard.after_step(result, position + 1), sums_before)
        progress = dataclasses.replace(progress, step=step + 1)
        with clock.logging:
            meter.after_step(position, result)
            tools.report.beat("step", position + 1)
        if profiler is not None:
            profiler.after_step()
        save_due = tools.saver is not None and tools.saver.is_due_by_time()
        verdict = tools.stop.poll(world, failed=waiting.error is not None, save_due=save_due)
        stop_signal = verdict.stop_signal
        if stop_signal:
            break
        if tools.saver is not None and step + 1 < plan.steps_per_epoch:
            with clock.saving:
                _save_if_due(tools.saver, guard, progress, sums, position + 1, verdict.save_due)
    if profiler is not None:
        profiler.end_epoch()
    waiting.raise_error_of_any_rank(world)
    guard.settle()
    seconds = meter.elapsed_seconds()
    steps_done = progress.step - first_step
    return EpochResult(
        _with_counts(progress, guard),
        seconds,
        images_per_second=steps_done * plan.global_batch / seconds,
        data_wait_share=meter.data_wait_share,
        stop_signal=stop_signal,
    )


def _save_if_due(
    saver: Saver, guard: StepGuard, progress: Progress, sums: ScoreSums, position: int, due_by_time: bool
) -> None:
    saver.note_outcome()
    if due_by_time or saver.is_due_by_steps(position):
        guard.settle()
        saver.save(_with_counts(progress, guard), sums.state())


def _with_counts(progress: Progress, guard: StepGuard) -> Progress:
    return dataclasses.replace(progress, skipped_steps=guard.skipped, bad_steps_in_row=guard.in_row)


@torch.no_grad()
def evaluate(
    engine: Engine, batches: EvaluationLoader, settings: LoopSettings, world: World, tools: LoopTools | None = None
) -> Scores | int:
    """Return exact scores of every validation sample, each counted once; a collective.

    Every rank holds the same number of batches, filled up with samples of weight 0.

    Returns:
        The scores, or the number of the stop signal that broke the evaluation off (with `tools` only).

    Raises:
        UserError: on all ranks, where an image on any rank cannot be read.
    """
    engine.train(False)
    recorder = SampleRecorder(settings.num_classes)
    waiting = _SafeBatches(batches, len(batches), settings, world)
    stop_signal = 0
    for batch in waiting:
        logits = engine.forward(batch.images)
        losses = sample_losses(logits, batch.labels)
        recorder.add(losses, logits, batch.labels, batch.weights, batch.indices)
        if tools is not None:
            tools.report.beat("evaluate")
            stop_signal = tools.stop.poll(world, failed=waiting.error is not None).stop_signal
            if stop_signal:
                break
    waiting.raise_error_of_any_rank(world)
    check_bad_images(batches, world)
    engine.train(True)
    return stop_signal or recorder.gather(world)


def _seed_dropout(seed: int, position: int, micro_batch: int, device: torch.device) -> None:
    """Make dropout a function of (seed, step, micro-batch of the step) alone.

    So a run that goes on in the middle needs no stored state, and as many micro-batches on another number of ranks
    draw the same.
    """
    state = np.random.SeedSequence((seed, position, micro_batch)).generate_state(1, np.uint64)
    # Not torch.manual_seed, which asks every kind of device for its generator: 120 microseconds against 1.
    torch.default_generator.manual_seed(int(state[0] >> 1))
    if device.type == "cuda":
        torch.cuda.manual_seed(int(state[0] >> 1))


class _SafeBatches:
    """An iterator over `count` batches that outlives an unreadable image.

    A rank that raised in the middle of a step would leave the others waiting in a collective. So after an error the
    rank goes on with empty batches of weight 0 until all ranks have agreed to stop.
    """

    def __init__(self, batches: Iterable[Batch], count: int, settings: LoopSettings, world: World) -> None:
        self._iterator: Iterator[Batch] = iter(batches)
        self._left = count
        self._settings, self._device = settings, world.device
        self.error: UserError | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._left == 0:
            raise StopIteration
        self._left -= 1
        if self.error is not None:
            return self._empty_batch()
        try:
            return next(self._iterator)
        except UserError as error:
            self.error = error
            return self._empty_batch()

    def raise_error_of_any_rank(self, world: World) -> None:
        """Raise on every rank what went wrong on the first rank that failed; a collective."""
        message = error_on_any_rank(str(self.error) if self.error else None, world)
        if message:
            raise AgreedError(message)

    def _empty_batch(self) -> Batch:
        size, side = self._settings.plan.batch_size_per_rank, self._settings.image_size
        images, weights = torch.zeros(size, 3, side, side, device=self._device), torch.zeros(size, device=self._device)
        labels = torch.zeros(size, dtype=torch.int64, device=self._device)
        return Batch(images, labels, weights, torch.zeros(size, dtype=torch.int64))
