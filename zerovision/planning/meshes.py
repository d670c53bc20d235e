"""Chooses between the ladder of `zerovision.planning.search` and other divisions of the training over the ranks.

A model that fits with `ddp`, if need be with fewer images at a time, keeps it: nothing exchanges less. For another one
the ladder recomputes, shards or offloads. Sharding without that, or a mesh of ranks, is taken in its place if nothing
on the ladder fits, or if it is estimated to be `WORTH` times as fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from zerovision.planning.search import Option, PlannedJob, descend, evaluate, fits, fits_nowhere
from zerovision.training.base.errors import UserError
from zerovision.training.base.settings import FEWEST_IMAGES
from zerovision.training.base.units import plural
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.engines.strategies import STRATEGIES, bubble
from zerovision.training.out_of_memory import Rung

WORTH = 1.25  # estimates of time are no better
SIZES = (2, 4, 8, 16)  # of a tensor group or a pipeline
KINDS = {
    "strategy": "every rank has whole layers, and their state is sharded",
    "tensor_parallel": "ranks compute every layer together, each with a part of its weights",
    "pipeline_parallel": "each rank has consecutive layers, or members of an ensemble",
}
MESH = ("tensor_parallel", "pipeline_parallel")
COSTS = ("activation_checkpointing", "strategy", "offload")  # changes of the ladder that take time


def recommend(job: PlannedJob) -> tuple[Option, list[Rung], list[Option]]:
    """Return what is recommended, what leads there from the job's configuration, and the best of each kind beside it.

    Raises:
        UserError: if nothing fits, with the nearest thing that works.
    """
    option, rungs = descend(job)
    is_cheap = option.fits and not any(name in rung.changes for rung in rungs for name in COSTS)
    is_asked = job.config.ranks_per_replica > 1 or job.config.engine == "deepspeed" or job.config.deepspeed_config
    others = [] if is_cheap or is_asked else _others(job, option.config)
    best = max(others, key=lambda other: other.images_per_s, default=option)
    if best.fits and (not option.fits or best.images_per_s >= WORTH * option.images_per_s):
        return best, [_as_rung(job, best, option)], others
    if not option.fits:
        raise fits_nowhere(job, option)
    return option, rungs, others


def _others(job: PlannedJob, end: TrainConfig) -> list[Option]:
    """Return the fastest option of each kind that fits, with the images of the job in an update.

    Args:
        job: that does not fit as it is.
        end: where the ladder ends; as many images at a time, or the fewest that are worth it, are tried.
    """
    groups, pipelines = ([{kind: size} for size in SIZES] for kind in MESH)
    # Over several machines: a group on each, whose stages they are (Narayanan et al. 2021, section 3.2).
    of_groups = [{"tensor_parallel": job.machine.ranks} | pipeline for pipeline in pipelines]
    found, has_several = [], job.ranks > job.machine.ranks > 1
    ways: list[list[dict[str, int]]] = [[{}], groups, pipelines, of_groups if has_several else []]
    for divisions in ways:
        fitting: list[Option] = []
        for divided in divisions:
            with contextlib.suppress(UserError, StopIteration):  # ranks or a model that cannot be divided so
                candidates = _candidates(job, divided, end)
                fitting.append(evaluate(job, next(each for each in candidates if fits(job, each))))
            if fitting and divisions is groups:
                break  # larger groups only exchange more
        found += [max(fitting, key=lambda option: option.images_per_s)] if fitting else []
    return found


def _candidates(job: PlannedJob, divided: dict[str, Any], end: TrainConfig) -> Iterator[TrainConfig]:
    """Yield configurations with so many ranks of each kind that the trainer takes, the fastest first."""
    config = dataclasses.replace(job.config, engine="torch", **divided)
    images = config.ranks_per_replica * config.micro_batch * config.gradient_accumulation_steps
    fewest = max(end.micro_batch, min(FEWEST_IMAGES, config.micro_batch))
    # A tensor group takes the images of its ranks at once, unless BatchNorm would see more of them.
    at_a_time = 1 if job.workload.has_batchnorm else config.tensor_parallel
    sizes = [each for each in dict.fromkeys((at_a_time * fewest, fewest)) if images % each == 0]
    for recomputes, batch_size, strategy in itertools.product((False, True), sizes, STRATEGIES):
        changes: dict[str, Any] = {
            "batch_size": batch_size,
            "activation_checkpointing": recomputes,
            "strategy": strategy,
        }
        steps = images // batch_size
        other = dataclasses.replace(config, gradient_accumulation_steps=steps, **changes)
        with contextlib.suppress(UserError):
            check_config(other, FLAG_OF)
            yield other


def _as_rung(job: PlannedJob, mesh: Option, other: Option) -> Rung:
    """Return a mesh as a change of the job's configuration, and why it is better than the ladder's end."""
    names = (*KINDS, "batch_size", "gradient_accumulation_steps", "activation_checkpointing", "offload")
    values = {name: getattr(mesh.config, name) for name in names}
    changes = {name: value for name, value in values.items() if value != getattr(job.config, name)}
    cost = ", ".join(KINDS[kind] for kind in MESH if kind in changes) or KINDS["strategy"]
    if mesh.config.has_stages:
        steps = mesh.config.gradient_accumulation_steps
        waits = bubble(mesh.plan.pipeline_parallel, mesh.config.pipeline_schedule, steps)
        cost += f", and waits for {waits:.0%} of a step"
    at_a_time = plural(other.config.micro_batch, "image")
    way = f"{other.config.strategy}, offload {other.config.offload}, {at_a_time} at a time,"
    cost += f"; {way} " + (
        f"is estimated to take {other.step.step_s / mesh.step.step_s:.1f} times as long"
        if other.fits
        else "does not fit"
    )
    seen = mesh.config.micro_batch
    return Rung(changes, cost, batchnorm_images=seen if seen != job.config.micro_batch else 0)
