"""One epoch of training, the usual step, and one pass of evaluation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from zerovision.models.ensemble import seed_generators
from zerovision.training.base.errors import AgreedError, UserError
from zerovision.training.base.timing import mean_shares
from zerovision.training.data.bad_images import check_bad_images
from zerovision.training.data.loader import Batch, Loader
from zerovision.training.engines.engine import Engine, Loss, StepInput, StepResult, TimedEngine
from zerovision.training.observe.observer import Seen, StepDone
from zerovision.training.steps.carrier import Run
from zerovision.training.tasks.scores import Scores
from zerovision.training.world.collectives import error_on_any_rank, gather_objects
from zerovision.training.world.signals import FAILED

# For groups that train independently: communication between groups may take longer than a step, so the result of a poll
# is awaited only at the next poll.
STEPS_BETWEEN_POLLS = 10


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """Computes the loss of each micro-batch separately, and accumulates the gradients."""

    loss: Loss

    def __call__(self, engine: TimedEngine, given: StepInput) -> StepResult | None:
        """See `zerovision.training.engines.engine.Step`."""
        result = None
        for micro_step, batch in enumerate(given.batches):
            given.seed_leaf(micro_step)
            logits = engine.forward(batch.images)
            losses = self.loss(logits, batch)
            engine.backward((losses * batch.weights).sum() * given.loss_scale)
            result = engine.step()
            given.note(batch, losses, logits)
        return result


class EpochResult(NamedTuple):
    """Measurements of one training epoch."""

    seconds: float
    images_per_second: float
    data_wait_share: float  # mean over the ranks
    stop_signal: int  # 0 unless the epoch ended early; see `StopRequest.poll`


def train_one_epoch(run: Run, batches: Iterable[Batch]) -> EpochResult:
    """Train from `run.state.progress` to the end of the epoch, or until a stop signal; a collective.

    All ranks run the same steps, and stop after the same step.

    Args:
        run: the run, whose state is updated.
        batches: this rank's micro-batches on its device, starting at the current step.

    Raises:
        UserError: on all ranks, if an image on any rank cannot be read.
        RunEnded: on all ranks, if the run cannot continue.
    """
    plan, state, first_step, stop_signal = run.plan, run.state, run.state.progress.step, 0
    waiting = SafeBatches(batches, (plan.steps_per_epoch - first_step) * plan.accumulation_steps, run)
    engine, start, spans = TimedEngine(state.engine, run.clock), time.perf_counter(), run.clock.seconds()
    for step in range(first_step, plan.steps_per_epoch):
        position = run.position
        run.observers.before_step(position)
        run.schedule.set_learning_rates(engine.optimizer.param_groups, position)
        own_batches, seed_leaf = islice(waiting, plan.accumulation_steps), partial(seed_own_leaf, run, position)
        scale = plan.loss_scale_for(step, run.world.data.rank)
        result = run.step(engine, StepInput(own_batches, seed_leaf, scale, partial(note, run)))
        state.progress = dataclasses.replace(state.progress, step=step + 1)
        run.observers.after_step(StepDone(position, result))
        stop_signal, save_due = 0, False
        if position % min(run.config.steps_alone, STEPS_BETWEEN_POLLS) == 0:
            stop_signal, save_due = run.start.stop.poll(run.world, failure=waiting.failure)
        if stop_signal:
            break
        if step + 1 < plan.steps_per_epoch:
            run.observers.between_steps(save_due=save_due, failed=bool(waiting.failure))
    waiting.raise_error()
    run.observers.after_steps()
    seconds = max(time.perf_counter() - start, 1e-9)
    own = {name: after - spans[name] for name, after in run.clock.seconds().items()}
    data_wait_share = mean_shares(gather_objects(own, run.world))["data"]
    return EpochResult(seconds, plan.images(first_step, state.progress.step) / seconds, data_wait_share, stop_signal)


def note(
    run: Run, batch: Batch, losses: torch.Tensor, logits: torch.Tensor, evidence: torch.Tensor | None = None
) -> None:
    """Pass a micro-batch to the observers; implements `zerovision.training.engines.engine.Note`."""
    run.observers.seen(Seen(batch, losses, logits, losses if evidence is None else evidence))


@torch.no_grad()
def evaluate(engine: Engine, batches: Loader, run: Run, thresholds: np.ndarray | None = None) -> Scores | int:
    """Return exact scores over all samples, each of which is counted once; a collective.

    Every rank has the same number of batches, which are padded with samples of weight 0.

    Args:
        engine: the model.
        batches: this rank's batches.
        run: the run.
        thresholds: see `Task.recorder`.

    Returns:
        The scores, or the number of the stop signal that ended the evaluation; see `StopRequest.poll`.

    Raises:
        UserError: on all ranks, if an image on any rank cannot be read.
    """
    engine.module.eval()
    recorder = run.task.recorder(thresholds)

    def record(batch: Batch, outputs: torch.Tensor) -> None:
        recorder.add(logits_of(outputs), batch.labels, batch.weights, batch.indices)

    forward = partial(forward_all, run, engine.outputs)
    stop_signal, logits_of = run.task.classifier(forward)
    stop_signal = stop_signal or forward(batches, record)
    engine.module.train()
    return stop_signal or recorder.gather(run.world)


def forward_all(
    run: Run,
    outputs_of: Callable[[Iterable[Batch]], Iterator[tuple[Batch, torch.Tensor]]],
    batches: Loader,
    record: Callable[[Batch, torch.Tensor], None],
) -> int:
    """Pass batches and their outputs (see `Engine.outputs`) to `record`; return the stop signal, or 0; a collective."""
    waiting, stop_signal = SafeBatches(batches, len(batches), run), 0
    for batch, outputs in outputs_of(waiting):
        record(batch, outputs)
        run.start.heartbeat.beat("evaluate")
        stop_signal = run.start.stop.poll(run.world, failure=waiting.failure).stop_signal
        if stop_signal:
            break
    waiting.raise_error()
    check_bad_images(batches, run.world)
    return stop_signal


def seed_own_leaf(run: Run, position: int, micro_step: int) -> None:
    """Seed dropout for a micro-batch of this rank; for `position`, see `BatchPlan.position`."""
    world = run.world
    seed_dropout(run.config.seed, position, run.plan.leaves.number(world.data.rank, micro_step), world.device)


def seed_dropout(seed: int, position: int, leaf: int, device: torch.device) -> None:
    """Make dropout depend only on (seed, step, leaf of the step); for leaves, see `base.leaves`.

    A run that resumes inside an epoch therefore needs no stored generator state, and the same micro-batches get the
    same masks on any number of ranks.
    """
    state = np.random.SeedSequence((seed, position, leaf)).generate_state(1, np.uint64)
    seed_generators(int(state[0] >> 1), device)


class SafeBatches:
    """An iterator over `count` batches that continues after an unreadable image.

    If a rank raised an error in the middle of a step, the other ranks would wait for it in a collective. So after an
    error, the rank continues with empty batches of weight 0 until all ranks have agreed to stop.
    """

    def __init__(self, batches: Iterable[Batch], count: int, run: Run) -> None:
        self._iterator: Iterator[Batch] = iter(batches)
        self._left, self._run = count, run
        self.error: UserError | None = None

    @property
    def failure(self) -> int:
        """The reason why this rank cannot continue, to pass to `StopRequest.poll`; 0 if the rank can continue."""
        return FAILED if self.error else 0

    def raise_error(self) -> None:
        """Raise the error of the first rank that has one, on all ranks; a collective."""
        error = error_on_any_rank(str(self.error) if self.error else None, self._run.world)
        if error is not None:
            raise AgreedError(error)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._left == 0:
            raise StopIteration
        self._left -= 1
        if self.error is None:
            try:
                with self._run.clock.data:
                    return next(self._iterator)
            except UserError as error:
                self.error = error
        size, device = self._run.plan.batch_size_per_rank, self._run.world.device
        images = torch.zeros(size, *self._run.data.preprocessing.shape, device=device)
        weights = torch.zeros(size, device=device)
        labels = torch.zeros(size, dtype=torch.int64, device=device)
        return Batch(images, labels, weights, torch.zeros(size, dtype=torch.int64))
