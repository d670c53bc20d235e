"""One epoch of training and one pass of evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

import numpy as np
import torch

from zerovision.models.ensemble import seed_generators
from zerovision.training.base.errors import AgreedError, UserError
from zerovision.training.base.timing import SpanClock
from zerovision.training.checkpoint.restore import TrainState
from zerovision.training.data.bad_images import check_bad_images
from zerovision.training.data.loader import Batch, Loader
from zerovision.training.engines.engine import Engine, StepInput
from zerovision.training.steps.context import TrainContext
from zerovision.training.steps.epoch_observer import EpochObserver, EpochResult
from zerovision.training.tasks.of_weights import task_of_labels
from zerovision.training.tasks.scores import Scores
from zerovision.training.world.collectives import error_on_any_rank
from zerovision.training.world.signals import FAILED


def train_one_epoch(state: TrainState, batches: Iterable[Batch], context: TrainContext) -> EpochResult:
    """Train from `state.progress` to the end of the epoch, or to a stop signal; a collective.

    All ranks run the same steps, and all stop after the same one.

    Args:
        state: model, optimizer, score sums of the epoch and position; updated in place.
        batches: this rank's micro-batches on its device, from `state.progress.step` on.
        context: what stays the same over all epochs of a run.

    Raises:
        UserError: on all ranks, if an image on any rank cannot be read.
        RunEnded: on all ranks, if the run cannot go on.
    """
    plan = context.plan
    micro_batches = (plan.steps_per_epoch - state.progress.step) * plan.accumulation_steps
    waiting = SafeBatches(batches, micro_batches, context, context.timing.clock)
    observer = EpochObserver(state, context)
    engine = observer.timed_engine
    for step in range(state.progress.step, plan.steps_per_epoch):
        position = observer.before_step()
        context.schedule.set_learning_rates(engine.optimizer.param_groups, position)
        own_batches, seed_leaf = islice(waiting, plan.accumulation_steps), partial(seed_own_leaf, context, position)
        scale = plan.loss_scale_for(step, context.world.data.rank)
        result = context.step(engine, StepInput(own_batches, seed_leaf, scale, observer.note))
        if observer.after_step(result, failure=waiting.failure):
            break
    waiting.raise_error()
    return observer.finish()


@torch.no_grad()
def evaluate(engine: Engine, batches: Loader, context: TrainContext, *, is_interruptible: bool = False) -> Scores | int:
    """Return exact scores of every validation sample, each counted once; a collective.

    Every rank has the same number of batches, padded with samples of weight 0.

    Args:
        engine: the model.
        batches: this rank's batches.
        context: what stays the same over all epochs of a run.
        is_interruptible: whether a stop signal ends the evaluation.

    Returns:
        The scores, or the number of the stop signal that ended the evaluation, as of `StopRequest.poll`.

    Raises:
        UserError: on all ranks, if an image on any rank cannot be read.
    """
    engine.module.eval()
    task = task_of_labels(context.num_classes, context.sets, context.thresholds)
    recorder = task.recorder(keeps_probabilities=context.keeps_probabilities)
    neighbours, stop_signal = context.neighbours, 0

    def record(batch: Batch, outputs: torch.Tensor) -> None:
        logits = outputs if neighbours is None else neighbours.log_probabilities(outputs)
        recorder.add(logits, batch.labels, batch.weights, batch.indices)

    forward = partial(forward_all, engine.outputs, context=context, is_interruptible=is_interruptible)
    if neighbours is not None:
        stop_signal = forward(neighbours.loader, neighbours.add)
        neighbours.gather()
    stop_signal = stop_signal or forward(batches, record)
    engine.module.train()
    return stop_signal or recorder.gather(context.world)


def forward_all(
    outputs_of: Callable[[Iterable[Batch]], Iterator[tuple[Batch, torch.Tensor]]],
    batches: Loader,
    record: Callable[[Batch, torch.Tensor], None],
    *,
    context: TrainContext,
    is_interruptible: bool,
) -> int:
    """Give `record` every batch with a network's outputs; return the stop signal that ended it, or 0; a collective.

    Args:
        outputs_of: as `Engine.outputs`.
        batches: this rank's.
        record: takes a batch and its outputs.
        context: of the run.
        is_interruptible: whether a stop signal ends it.
    """
    waiting, stop_signal = SafeBatches(batches, len(batches), context), 0
    for batch, outputs in outputs_of(waiting):
        record(batch, outputs)
        if is_interruptible:
            context.heartbeat.beat("evaluate")
            stop_signal = context.stop.poll(context.world, failure=waiting.failure).stop_signal
            if stop_signal:
                break
    waiting.raise_error()
    check_bad_images(batches, context.world)
    return stop_signal


def seed_own_leaf(context: TrainContext, position: int, micro_step: int) -> None:
    """Seed dropout for a micro-batch of this rank; `position` as of `BatchPlan.position`."""
    world = context.world
    seed_dropout(context.seed, position, context.plan.leaves.number(world.data.rank, micro_step), world.device)


def seed_dropout(seed: int, position: int, leaf: int, device: torch.device) -> None:
    """Make dropout a function of (seed, step, leaf of the step) alone; for leaves see `base.leaves`.

    A run that resumes inside an epoch therefore needs no stored generator state, and the same micro-batches on another
    number of ranks draw the same masks.
    """
    state = np.random.SeedSequence((seed, position, leaf)).generate_state(1, np.uint64)
    seed_generators(int(state[0] >> 1), device)


class SafeBatches:
    """An iterator over `count` batches that continues after an unreadable image.

    If a rank raised in the middle of a step, the others would wait for it in a collective. So after an error the rank
    goes on with empty batches of weight 0 until all ranks have agreed to stop.
    """

    def __init__(
        self, batches: Iterable[Batch], count: int, context: TrainContext, clock: SpanClock | None = None
    ) -> None:
        """Iterate; with a clock, waiting for a batch counts as its span `data`."""
        self._iterator: Iterator[Batch] = iter(batches)
        self._left, self._context = count, context
        self._clock = clock or SpanClock()
        self.error: UserError | None = None

    @property
    def failure(self) -> int:
        """Why this rank cannot go on, for `StopRequest.poll`; 0 if it can."""
        return FAILED if self.error else 0

    def raise_error(self) -> None:
        """Raise the error of the first rank that has one, on all ranks; a collective."""
        error = error_on_any_rank(str(self.error) if self.error else None, self._context.world)
        if error is not None:
            raise AgreedError(error)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._left == 0:
            raise StopIteration
        self._left -= 1
        if self.error is not None:
            return self._empty_batch()
        try:
            with self._clock.data:
                return next(self._iterator)
        except UserError as error:
            self.error = error
            return self._empty_batch()

    def _empty_batch(self) -> Batch:
        size, device = self._context.plan.batch_size_per_rank, self._context.world.device
        images, weights = torch.zeros(size, *self._context.image_shape, device=device), torch.zeros(size, device=device)
        labels = torch.zeros(size, dtype=torch.int64, device=device)
        return Batch(images, labels, weights, torch.zeros(size, dtype=torch.int64))
