"""An epoch of a run: training, evaluation, and what the scores decide."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from zerovision.models.weights_file import not_finite
from zerovision.training.base.points import EpochPoint, merit
from zerovision.training.checkpoint.saver import Saver
from zerovision.training.data.bad_images import check_bad_images
from zerovision.training.engines.parameter_shards import gather_weights
from zerovision.training.loop import evaluate, train_one_epoch
from zerovision.training.observe.best_weights import write_best
from zerovision.training.observe.step_metrics import peak_memory_per_rank
from zerovision.training.setup import Run
from zerovision.training.steps.context import TrainContext
from zerovision.training.steps.epoch_observer import EpochResult
from zerovision.training.tasks import read_distill
from zerovision.training.tasks.class_scores import count_classes, score_of
from zerovision.training.tasks.scores import Scores
from zerovision.training.world.collectives import error_on_any_rank

# Times the loss of a uniform guess, log(classes): the geometric mean of the true class's probability is then
# classes ** -10. Good trainings stay far below, also while BatchNorm's running statistics lag behind at the start.
GUESSES_ALLOWED = 10


def begin_epoch(context: Run) -> None:
    """Decide what learns in the epoch that is next, or goes on."""
    progress = context.state.progress
    context.freezer.start_epoch(only_head=progress.epoch < context.head_epochs)
    if progress.epoch == context.head_epochs > 0 and progress.step == 0:
        context.state.engine.restart_optimizer()


def train_and_evaluate(context: Run, loop: TrainContext, saver: Saver) -> int:
    """Train and evaluate one epoch, or the part of it before a signal, and save; return the signal."""
    state, world, clock = context.state, context.world, loop.timing.clock
    engine, epoch = state.engine, state.progress.epoch
    begin_epoch(context)
    first_step, last_step = state.progress.step, context.plan.steps_per_epoch
    only_evaluation_is_left = first_step == last_step
    write_weights = None
    result = train_one_epoch(state, context.train_loader.epoch(epoch, state.progress.step), loop)
    check_bad_images(context.train_loader, world)
    stop_signal = result.stop_signal
    if state.progress.step == last_step:
        # A checkpoint of this moment holds averaged buffers: averaging them again would round them again.
        if not only_evaluation_is_left:
            engine.buffers.average(world.data)
        if not stop_signal:
            evaluation_start = time.perf_counter()
            with context.averages.in_use():
                with clock.evaluation:
                    scores = evaluate(engine, context.val_loader, loop, is_interruptible=True)
                if isinstance(scores, Scores):
                    seconds = time.perf_counter() - evaluation_start
                    write_weights = _end_epoch(context, loop, result, scores, seconds)
                    is_last = state.progress.epoch == context.config.epochs
                    context.contents.after_epoch(is_last_chance=first_step == 0 or is_last)
                else:
                    stop_signal = scores
    with clock.saving:
        saver.save(write_weights)
    return stop_signal


def _end_epoch(
    context: Run,
    loop: TrainContext,
    result: EpochResult,
    scores: Scores,
    evaluation_seconds: float,
) -> Callable[[], None] | None:
    """Log an epoch and count it; if it is the best so far, return what writes its weights. A collective."""
    state, world, clock = context.state, context.world, loop.timing.clock
    train_scores = state.sums.reduce(world)
    state.sums.reset()
    is_trained = train_scores.samples > 0  # by a step that was applied
    train_loss = train_scores.loss if is_trained else None
    # A loss that compares images guesses among those of a step.
    choices = loop.num_classes if loop.neighbours is None else max(loop.num_classes, loop.plan.global_batch)
    # A divergence at a temperature of T is of logits / T, times T squared.
    scale = max(1.0, read_distill(context.config.distill)[0]) ** 2 if context.config.distill else 1.0
    diverged = find_divergence((train_loss or 0.0) / scale, scores.loss, choices)
    write_weights, best_by = None, context.config.best_by
    of_epoch = score_of(scores, best_by, loop.num_classes)
    score = merit(best_by, of_epoch)
    before = state.progress.best_score if state.progress.best_epoch else -math.inf
    if diverged is None and score > before:  # of a score that is not a number never
        with clock.saving:
            weights = context.adapters.merge(gather_weights(state.engine, world))
            broken = error_on_any_rank(not_finite(weights), world)
        if broken is None:
            epoch = state.progress.epoch + 1
            write_weights = write_best(
                context.folder, weights, context.built, context.data, context.config.data, epoch, scores
            )
        else:
            diverged = f"the weights hold NaN or infinity, first in {broken}"
    is_best = write_weights is not None
    state.progress = state.progress.after_epoch(score, is_best=is_best, has_diverged=diverged is not None)
    memory, names = peak_memory_per_rank(world), context.data.class_names
    lowest, lowest_recall = count_classes(scores, len(names)).lowest_recall
    point = EpochPoint(
        epoch=state.progress.epoch,
        step=context.position,
        epochs=context.config.epochs,
        train_loss=train_loss,
        train_top1=train_scores.top1 if is_trained else None,
        validation=scores,
        images_per_second=result.images_per_second,
        data_wait_share=result.data_wait_share,
        seconds=result.seconds,
        evaluation_seconds=evaluation_seconds,
        memory_bytes_per_rank=memory,
        is_best=is_best,
        diverged=diverged,
        class_names=names,
        best_by=best_by,
        score=of_epoch,
        lowest_recall=lowest_recall,
        lowest_recall_class=names[lowest],
    )
    with clock.logging:
        context.loggers.epoch(point)
        if diverged:
            context.loggers.event("diverged", {"step": point.step, "epoch": point.epoch, "reason": diverged})
            context.loggers.message(f"epoch {point.epoch} has diverged: {diverged}")
    return write_weights


def find_divergence(train_loss: float, val_loss: float, choices: int) -> str | None:
    """Return the reason why an epoch with these mean losses (nats) has diverged, None if it has not.

    A uniform guess is one of so many choices.
    """
    guess = math.log(max(choices, 2))
    for name, loss in (("validation loss", val_loss), ("training loss", train_loss)):
        if not math.isfinite(loss):
            return f"the {name} is {loss}"
        if loss > GUESSES_ALLOWED * guess:
            return f"the {name} is {loss:.3g}, that of a uniform guess {guess:.3g}"
    return None
