"""An epoch of a run: training, evaluation, and decisions based on the scores; after the last one, the final test."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from zerovision.models.weights_file import not_finite
from zerovision.training.base.errors import UserError
from zerovision.training.base.points import SCORE_NAMES, EpochPoint, ScoreSummary, merit
from zerovision.training.base.run_folder import TEST_EVALUATION
from zerovision.training.base.units import percent
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.data.bad_images import check_bad_images
from zerovision.training.data.loader import Loader
from zerovision.training.data.reader import Batch
from zerovision.training.data.sampler import EvaluationPlan
from zerovision.training.engines.engine import Engine
from zerovision.training.engines.parameter_shards import gather_weights
from zerovision.training.engines.precision import under_autocast
from zerovision.training.loop import EpochResult, evaluate, train_one_epoch
from zerovision.training.observe.best_weights import epoch_of, write_best
from zerovision.training.observe.device_use import peak_memory_per_rank
from zerovision.training.observe.evaluation import describe_scores, read_scores, write_scores
from zerovision.training.steps.carrier import Run
from zerovision.training.tasks.labels import task_of
from zerovision.training.tasks.scores import Scores, count_classes, score_of
from zerovision.training.world.collectives import agreed, broadcast_object, error_on_any_rank

# An epoch has diverged if its loss is above this many times the loss of a uniform guess, log(classes): the geometric
# mean of the true class's probability is then below classes ** -10. Good runs stay far below this limit, even at the
# start, when BatchNorm's running statistics lag behind.
GUESSES_ALLOWED = 10


def begin_epoch(run: Run) -> None:
    """Select the parts of the model to train in the epoch that begins or continues."""
    progress, head_epochs = run.state.progress, run.model.head_epochs
    run.model.freezer.start_epoch(only_head=progress.epoch < head_epochs)
    if progress.epoch == head_epochs > 0 and progress.step == 0:
        run.state.engine.restart_optimizer()


def train_and_evaluate(run: Run) -> int:
    """Train, evaluate and save one epoch, or the part of it before a stop signal; return the signal, or 0."""
    state, world = run.state, run.world
    first_step, last_step = state.progress.step, run.plan.steps_per_epoch
    begin_epoch(run)
    write_best = None
    result = train_one_epoch(run, run.readers.train.epoch(state.progress.epoch, first_step))
    check_bad_images(run.readers.train, world)
    stop_signal = result.stop_signal
    if state.progress.step == last_step:
        # A checkpoint saved at this point contains averaged buffers: averaging them again would round them twice.
        if first_step != last_step:
            state.engine.buffers.average(world.data)
        if not stop_signal:
            start = time.perf_counter()
            with run.model.averages.in_use():
                with run.clock.evaluation:
                    scores = evaluate(state.engine, run.readers.val, run)
                if isinstance(scores, Scores):
                    write_best = _end_epoch(run, result, scores, time.perf_counter() - start)
                    is_last = state.progress.epoch == run.config.epochs
                    run.readers.contents.after_epoch(is_last_chance=first_step == 0 or is_last)
                else:
                    stop_signal = scores
    run.observers.after_epoch(write_best)
    return stop_signal


def _end_epoch(run: Run, result: EpochResult, scores: Scores, evaluation_seconds: float) -> Callable[[], None] | None:
    """Log an epoch, update the progress, and return a writer of its weights if it is the best so far; a collective."""
    state, world, names, best_by = run.state, run.world, run.data.class_names, run.config.best_by
    train_scores = state.sums.reduce(world)
    state.sums.reset()
    is_trained = train_scores.samples > 0  # at least one step was applied
    train_loss = train_scores.loss if is_trained else None
    choices = max(len(names), run.plan.global_batch if run.config.embedding else 0)
    diverged = find_divergence((train_loss or 0.0) / run.task.loss_scale, scores.loss, choices)
    of_epoch = score_of(scores, best_by, len(names))
    score = merit(best_by, of_epoch)
    write_best = None
    if diverged is None and state.progress.is_beaten_by(score, scores.loss):
        write_best, diverged = _keep_best(run, scores)
    is_best = write_best is not None
    state.progress = state.progress.after_epoch(score, scores.loss, is_best=is_best, has_diverged=diverged is not None)
    lowest, lowest_recall = count_classes(scores, len(names)).lowest_recall
    point = EpochPoint(
        epoch=state.progress.epoch,
        step=run.position,
        epochs=run.config.epochs,
        train_loss=train_loss,
        train_top1=train_scores.top1 if is_trained else None,
        validation=scores,
        summary=ScoreSummary(best_by, of_epoch, lowest_recall, names[lowest]),
        images_per_second=result.images_per_second,
        data_wait_share=result.data_wait_share,
        seconds=result.seconds,
        evaluation_seconds=evaluation_seconds,
        memory_bytes_per_rank=peak_memory_per_rank(world),
        is_best=is_best,
        diverged=diverged,
        class_names=names,
    )
    with run.clock.logging:
        run.loggers.epoch(point)
        if diverged:
            run.loggers.event("diverged", {"step": point.step, "epoch": point.epoch, "reason": diverged})
            run.loggers.message(f"epoch {point.epoch} has diverged: {diverged}")
    return write_best


def _keep_best(run: Run, scores: Scores) -> tuple[Callable[[], None] | None, str | None]:
    """Return the function that writes the best epoch's weights, or the reason why the epoch diverged; a collective."""
    with run.clock.saving:
        weights = run.model.adapters.merge(gather_weights(run.state.engine, run.world))
        broken = error_on_any_rank(not_finite(weights), run.world)
    if broken is not None:
        return None, f"the weights hold NaN or infinity, first in {broken}"
    judged = {"epoch": run.state.progress.epoch + 1, "data": run.config.data}
    return write_best(run.folder, weights, run.model.built, run.data, scores, judged), None


def find_divergence(train_loss: float, val_loss: float, choices: int) -> str | None:
    """Return the reason why an epoch with these mean losses, in nats, has diverged, or None if it has not.

    The losses are compared with the loss of a uniform guess among `choices` possibilities.
    """
    guess = math.log(max(choices, 2))
    for name, loss in (("validation loss", val_loss), ("training loss", train_loss)):
        if not math.isfinite(loss):
            return f"the {name} is {loss}"
        if loss > GUESSES_ALLOWED * guess:
            return f"the {name} is {loss:.3g}; a uniform guess has {guess:.3g}"
    return None


@dataclasses.dataclass(frozen=True)
class _WholeModel:
    """The methods of `Engine` that an evaluation uses, for an unsharded network on every rank."""

    module: nn.Module

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
        """See `Engine.outputs`."""
        return ((batch, self.module(batch.images)) for batch in batches)


def judge_test(run: Run) -> None:
    """Evaluate the test part and write its scores to a separate folder, unless they already exist; a collective.

    An error is only logged; the run does not fail, because its weights are already saved.
    """
    test, world, folder = run.data.test, run.world, run.folder
    best_epoch = run.state.progress.best_epoch
    if test is None or not broadcast_object(best_epoch > 0 and _is_due(run), world):
        return
    try:
        module, metadata = agreed(lambda: load_model(folder.weights), world)
        network = under_autocast(module.to(world.device), run.precision, world.device)
        scores = _score(run, network, task_of(metadata).thresholds)
    except UserError as error:
        run.loggers.message(f"note: the test part could not be evaluated: {error}")
        return
    if not isinstance(scores, Scores):
        run.loggers.message("note: the test part was not evaluated: run scripts/evaluate.py RUN --split test")
        return
    values = {name: getattr(scores, name) for name in ("samples", "loss", "top1", "top5")}
    best_by, other = run.config.best_by, ""
    if best_by not in values and math.isfinite(score := score_of(scores, best_by, len(run.data.class_names))):
        values[best_by] = score
        other = f", {SCORE_NAMES[best_by]} {percent(score)}"
    run.loggers.message(
        f"test         top-1 {percent(scores.top1)}{other} on the {scores.samples} images of the test part, evaluated "
        f"once, with the weights of epoch {best_epoch}"
    )
    run.loggers.event("test", {"step": run.position, "epoch": best_epoch} | values)
    if world.is_main:
        facts: dict[str, Any] = {"epoch": best_epoch, "data": run.config.data, "split": "test"}
        facts |= describe_scores(scores, run.data.class_names, test.source)
        try:
            write_scores(folder.path / TEST_EVALUATION, facts)
        except (OSError, UserError) as error:
            run.loggers.message(f"note: the scores of the test part could not be written: {error}")


def _is_due(run: Run) -> bool:
    """Return whether the folder's weights are those of the best epoch and the test part has not been evaluated yet.

    Only rank 0 calls this.
    """
    folder, best_epoch = run.folder, run.state.progress.best_epoch
    try:
        judged = (read_scores(folder.path / TEST_EVALUATION) or {}).get("epoch")
    except (OSError, ValueError, AttributeError):
        judged = None
    return epoch_of(folder.weights) == best_epoch != judged


def _score(run: Run, network: nn.Module, thresholds: np.ndarray | None) -> Scores | int:
    """Return the result of `evaluate`; a collective."""
    data, world = run.data, run.world
    assert data.test is not None
    plan = EvaluationPlan(len(data.test), run.config.micro_batch, world.data.size)
    # The same workers read all splits.
    loader = Loader(data.test, plan, world.data.rank, workers=run.readers.val.pool or 0, device=world.device)
    with run.clock.evaluation:
        return evaluate(cast(Engine, _WholeModel(network)), loader, run, thresholds)
