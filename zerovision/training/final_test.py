"""Evaluates the test part once, after training, with the weights of the best epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from zerovision.training.base.errors import UserError
from zerovision.training.base.points import SCORE_NAMES
from zerovision.training.base.run_folder import TEST_EVALUATION
from zerovision.training.base.units import percent
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.data.loader import Loader
from zerovision.training.data.reader import Batch
from zerovision.training.data.sampler import EvaluationPlan
from zerovision.training.engines.engine import Engine
from zerovision.training.engines.precision import under_autocast
from zerovision.training.loop import evaluate
from zerovision.training.observe.best_weights import epoch_of
from zerovision.training.observe.evaluation import describe_scores, read_scores, write_scores
from zerovision.training.steps.carrier import Run
from zerovision.training.tasks.class_scores import score_of
from zerovision.training.tasks.labels import task_of
from zerovision.training.tasks.scores import Scores
from zerovision.training.world.collectives import agreed, broadcast_object


@dataclasses.dataclass(frozen=True)
class _WholeModel:
    """The methods of `Engine` that an evaluation uses, for an unsharded network on every rank."""

    module: nn.Module

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
        """See `Engine.outputs`."""
        for batch in batches:
            yield batch, self.module(batch.images)


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
    if best_by not in values:
        values[best_by] = score_of(scores, best_by, len(run.data.class_names))
        other = f", {SCORE_NAMES[best_by]} {percent(values[best_by])}"
    run.loggers.message(
        f"test         top-1 {percent(scores.top1)}{other} on the {scores.samples} images of the test part, evaluated "
        f"once, with the weights of epoch {best_epoch}"
    )
    run.loggers.event("test", {"step": run.position, "epoch": best_epoch} | values)
    if world.is_main:
        facts: dict[str, Any] = {"epoch": best_epoch, "data": run.config.data, "split": "test"}
        facts |= describe_scores(scores, run.data.class_names, test.source.name)
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
    workers = run.readers.val.pool or 0  # the same workers read all splits
    loader = Loader(data.test, plan, world.data.rank, workers=workers, device=world.device)
    with run.clock.evaluation:
        return evaluate(cast(Engine, _WholeModel(network)), loader, run, thresholds)
