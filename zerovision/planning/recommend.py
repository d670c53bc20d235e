"""Chooses how a job runs on given GPUs: the first rung of a ladder of settings on which the job fits.

Each rung uses the default engine, or the first other engine with which the job fits. The rungs come from
`out_of_memory.next_rung`, fastest settings first; a run that is out of memory descends the same ladder, which is drawn
in docs/dev/strategies.md. After stage 3 and before costlier rungs, the planner tries to divide each copy of the model
among as few ranks as possible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from zerovision.models import sides, size_of
from zerovision.planning.machines import GPUS
from zerovision.planning.search import Option, PlannedJob, engines_of, evaluate, fits
from zerovision.training.base.errors import UserError
from zerovision.training.base.settings import FEWEST_IMAGES
from zerovision.training.base.units import format_bytes, plural
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.engines.settings import WAYS
from zerovision.training.engines.ways import OUR_ENGINE, STRATEGIES
from zerovision.training.out_of_memory import Rung, next_rung

SMALLEST_IMAGE = 32  # pixels, the smallest image size to suggest
SIZES = (2, 4, 8, 16)  # numbers of ranks that share a copy of the model
MESH = {way.flag: way for way in reversed(WAYS) if way.division}  # in the order in which they are tried


def recommend(job: PlannedJob) -> tuple[Option, list[Rung]]:
    """Return the first option that fits, and the changes that lead from the job's configuration to that option.

    Raises:
        UserError: if the ranks or settings contradict each other, or nothing fits; the message names the nearest
            alternatives that work.
    """
    config, rungs = job.config, list[Rung]()
    tries_meshes = config.ranks_per_replica == 1 and config.engine in OUR_ENGINE and not config.has_own_sharding
    while (fitting := next((each for each in engines_of(job, config) if fits(job, each)), None)) is None:
        rung = next_rung(config, job.ranks, has_gpus=job.has_gpus)
        if tries_meshes and (rung is None or _costs_more_than_a_mesh(rung)):
            tries_meshes, mesh = False, _first_mesh(job, config.micro_batch)
            if mesh is not None:
                return evaluate(job, mesh), [_as_rung(job.config, mesh)]
        if rung is None:
            raise fits_nowhere(job, evaluate(job, config))
        config = dataclasses.replace(config, **rung.changes)
        rungs.append(rung)
    return evaluate(job, fitting), rungs


def _costs_more_than_a_mesh(rung: Rung) -> bool:
    return "offload" in rung.changes or rung.changes.get("batch_size", FEWEST_IMAGES) < FEWEST_IMAGES


def _first_mesh(job: PlannedJob, batch_size: int) -> TrainConfig | None:
    """Return the settings with the smallest mesh that fits, keeping the images per update, or None if none does."""
    kinds = [{flag: size} for flag in MESH for size in SIZES]
    # On several machines, each machine's ranks form a tensor group, which runs one stage (Narayanan et al.
    # 2021, section 3.2).
    of_a_machine = {flag: job.machine.ranks for flag, way in MESH.items() if way.divides_layers}
    of_groups = [of_a_machine | stages for stages in kinds if not of_a_machine.keys() & stages.keys()]
    for divided in (*kinds, *(of_groups if job.ranks > job.machine.ranks > 1 else [])):
        with contextlib.suppress(UserError):  # ranks or a model that cannot be divided like this
            for config in _candidates(job, divided, batch_size):
                if fits(job, config):
                    return config
    return None


def _candidates(job: PlannedJob, divided: dict[str, Any], batch_size: int) -> Iterator[TrainConfig]:
    """Yield configurations that divide the model among the numbers of ranks in `divided`, fastest first."""
    config = dataclasses.replace(job.config, engine="torch", **divided)
    images = config.ranks_per_replica * config.micro_batch * config.gradient_accumulation_steps
    # A tensor group processes the images of its ranks together, unless BatchNorm would then see more images.
    at_a_time = 1 if job.workload.has_batchnorm else config.ranks_per_layer
    sizes = [each for each in dict.fromkeys((at_a_time * batch_size, batch_size)) if images % each == 0]
    for recomputes, size, strategy in itertools.product((False, True), sizes, STRATEGIES):
        changes: dict[str, Any] = {"batch_size": size, "activation_checkpointing": recomputes, "strategy": strategy}
        other = dataclasses.replace(config, gradient_accumulation_steps=images // size, **changes)
        with contextlib.suppress(UserError):
            check_config(other, FLAG_OF)
            yield other


def _as_rung(config: TrainConfig, mesh: TrainConfig) -> Rung:
    """Return the rung that turns a configuration into the configuration with a mesh."""
    names = ("strategy", *MESH, "batch_size", "gradient_accumulation_steps", "activation_checkpointing")
    values = {name: getattr(mesh, name) for name in names}
    changes = {name: value for name, value in values.items() if value != getattr(config, name)}
    cost = ", ".join(way.division for flag, way in MESH.items() if flag in changes)
    seen = mesh.micro_batch
    return Rung(changes, cost, seen if seen != config.micro_batch else 0, config)


def reason(job: PlannedJob, chosen: Option, rungs: list[Rung]) -> str:
    """Return one sentence that explains why this option is recommended."""
    need = f"{format_bytes(chosen.memory.peak)} of {format_bytes(job.machine.gpu.memory_bytes)} per GPU"
    if chosen.memory.offloaded:
        need += f" and {format_bytes(job.host_bytes(chosen))} of each machine's own memory for offloaded state"
    default = evaluate(job, dataclasses.replace(chosen.config, engine=job.config.engine))
    if default.engine != chosen.engine:
        need += f"; --engine {default.engine} would need {format_bytes(default.memory.peak)}"
    if rungs:
        last = {tuple(rung.changes): rung for rung in rungs}.values()  # the last rung for each set of settings
        way = "; then ".join(rung.describe(has_batchnorm=job.workload.has_batchnorm) for rung in last)
        asked = format_bytes(evaluate(job, job.config).memory.peak)
        return f"as requested, it would need {asked} per GPU; {way}; it then needs {need}"
    return f"it needs {need}, so no memory has to be saved"


def fits_nowhere(job: PlannedJob, smallest: Option) -> UserError:
    """Return the error for a job that does not fit, with its minimum memory and the nearest GPU or size that works."""
    need, gpu = smallest.memory.peak, job.machine.gpu
    enough = [
        other.name
        for other in sorted(GPUS.values(), key=lambda other: other.memory_bytes)
        if other.memory_bytes >= need and job.precision in other.precisions
    ]
    works = [f"--gpu {enough[0]}"] if enough else []
    # Smaller images reduce only activations.
    is_too_large = evaluate(job, smallest.config, counts_activations=False).memory.peak > gpu.memory_bytes
    size = job.image_size
    with contextlib.suppress(UserError):  # the network accepts only one size
        while not is_too_large and min(sides(size)) >= 2 * SMALLEST_IMAGE:
            size = size_of(*(side // 2 for side in sides(size)))
            config = dataclasses.replace(smallest.config, image_size=size)
            if evaluate(dataclasses.replace(job, config=config, image_size=size), config).fits:
                works.append(f"--image-size {size}")
                break
    least = f"{smallest.config.strategy}, {plural(smallest.config.micro_batch, 'image')} and all memory savings"
    return UserError(
        f"{job.config.model_type} with {job.image_size}-pixel images does not fit on {job.ranks} x {gpu.name}: "
        f"it needs {format_bytes(need)} of {format_bytes(gpu.memory_bytes)} each even with {least}. "
        f"The nearest settings that work: {' or '.join(works) or 'a smaller model'}."
    )
