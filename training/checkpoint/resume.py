"""Going on from a checkpoint: which one, whether it fits this run, and filling the engine from it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from safetensors import SafetensorError

from training.checkpoint.manifest import MOST_SHARDS, DamagedCheckpoint, Manifest
from training.checkpoint.shards import CheckpointReader
from training.checkpoint.store import FoundCheckpoint
from training.config import CHANGEABLE_ON_RESUME, FIELDS, FLAG_OF, TrainConfig
from training.errors import UserError, one_line, shown
from training.observe.scores import ScoreSums
from training.parallel.engine import Engine, frozen_parameters
from training.parallel.world import World
from training.state import TrainState


def keep_global_batch(config: TrainConfig, found: FoundCheckpoint | None, world: World) -> TrainConfig:
    """Return the configuration with the accumulation steps that keep the checkpoint's global batch.

    Raises:
        UserError: where the ranks and the batch size do not divide it, with what does.
    """
    if found is None:
        return config
    global_batch = found.manifest.identity.get("global batch")
    if type(global_batch) is not int or not 0 < global_batch < 2**63:
        raise UserError(f"checkpoint {found.path}: its global batch {shown(global_batch)} is no whole number.")
    per_step = config.batch_size * world.size
    if global_batch % per_step == 0:
        accumulation_steps, most = global_batch // per_step, FIELDS["gradient_accumulation_steps"].metadata["high"]
        if accumulation_steps > most:
            raise UserError(
                f"--batch-size {config.batch_size} x {world.size} ranks takes {accumulation_steps} accumulation steps "
                f"for the checkpoint's global batch of {global_batch}, {most} are allowed: use a larger --batch-size."
            )
        return dataclasses.replace(config, gradient_accumulation_steps=accumulation_steps)
    if global_batch % world.size:
        sizes = _divisors(global_batch, MOST_SHARDS)
        raise UserError(
            f"{world.size} ranks cannot share the checkpoint's global batch of {global_batch} evenly: "
            f"use {one_line(_choice(sizes))} ranks."
        )
    sizes = _divisors(global_batch // world.size, FIELDS["batch_size"].metadata["high"])
    raise UserError(
        f"--batch-size {config.batch_size} x {world.size} ranks does not divide the checkpoint's global batch of "
        f"{global_batch}: use --batch-size {one_line(_choice(sizes))}."
    )


def check_fit(found: FoundCheckpoint, config: TrainConfig, identity: dict[str, Any], steps_per_epoch: int) -> None:
    """Refuse a checkpoint of another model, class list, data set or recipe, or of a position that this run never has.

    Args:
        found: the checkpoint.
        config: this run's configuration.
        identity: this run's, see `Manifest.identity`.
        steps_per_epoch: optimizer steps of one epoch of this run.

    Raises:
        UserError: naming the first difference.
    """
    manifest = found.manifest
    for key, value in identity.items():
        saved = manifest.identity.get(key)
        if saved != value:
            difference = one_line(_difference(saved, value), 400)
            raise UserError(f"checkpoint {found.path} was made with another {key}: {difference}.")
    for name, field in FIELDS.items():
        if name in CHANGEABLE_ON_RESUME:
            continue
        # A flag that is younger than the checkpoint had its default.
        saved, given = manifest.config.get(name, field.default), getattr(config, name)
        if saved != given:
            raise UserError(
                f"checkpoint {found.path} was made with {FLAG_OF[name]} {shown(saved)}, this run has {shown(given)}: "
                "give the same to go on, or start a new run with --weights."
            )
    progress = manifest.progress
    if progress.epoch > config.epochs or progress.step > steps_per_epoch:
        raise UserError(
            f"checkpoint {found.path} stands at epoch {progress.epoch}, step {progress.step}: this run has "
            f"{config.epochs} epochs of {steps_per_epoch} steps."
        )


def restore(found: FoundCheckpoint, state: TrainState, world: World) -> None:
    """Fill a fresh state from a verified checkpoint; a collective.

    Raises:
        UserError: where its content is not what this model has.
    """
    manifest, engine, sums = found.manifest, state.engine, state.sums
    try:
        reader = CheckpointReader(found.path, manifest)
        buffers = reader.buffers(world.rank, world.size)
        epoch_sums = reader.epoch_sums(world.rank, world.size)
        _check_names(engine, manifest, buffers)
        _check_moments(engine, manifest, reader)
        _check_sums(epoch_sums, sums)
        engine.write_state(reader.weights, reader.moments, manifest.applied_steps)
        for name, buffer in engine.module.named_buffers():
            buffer.copy_(buffers[name])
        sums.restore(epoch_sums)
    except (DamagedCheckpoint, SafetensorError, RuntimeError, KeyError) as error:
        raise UserError(f"checkpoint {found.path} cannot be used: {one_line(error)}") from None
    if engine.loss_scale is not None and manifest.loss_scale:
        engine.loss_scale.restore(manifest.loss_scale)
    state.progress = manifest.progress


def _check_names(engine: Engine, manifest: Manifest, buffers: dict[str, Any]) -> None:
    ours = engine.parameter_shapes()
    if ours != manifest.parameters:
        theirs = manifest.parameters
        other = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        raise DamagedCheckpoint(f"{len(other)} parameters differ from this model's, first {other[0]}")
    kinds = {name: (buffer.shape, buffer.dtype) for name, buffer in engine.module.named_buffers()}
    if kinds != {name: (buffer.shape, buffer.dtype) for name, buffer in buffers.items()}:
        raise DamagedCheckpoint("its buffers differ from this model's")


def _check_moments(engine: Engine, manifest: Manifest, reader: CheckpointReader) -> None:
    """Refuse other moments than the optimizer's; there may be none before its first step, when they are zeros."""
    ours, theirs = sorted(engine.flat_shards()[0].moments), sorted(reader.moments)
    if (theirs or manifest.applied_steps) and theirs != ours:
        shown = one_line(", ".join(theirs) or "none")
        raise DamagedCheckpoint(f"its moments are {shown}, the optimizer has {', '.join(ours) or 'none'}")
    if theirs and reader.frozen != frozen_parameters(engine.module).keys():
        raise DamagedCheckpoint("other parameters are frozen in it than in this model")


def _check_sums(found: torch.Tensor, sums: ScoreSums) -> None:
    """Refuse sums that no epoch has: every later average of it would be wrong, or not a number."""
    own = sums.state()
    if (found.shape, found.dtype) != (own.shape, own.dtype):
        raise DamagedCheckpoint("its sums of the epoch have another shape or dtype")
    loss, top1, top5, samples = found.tolist()
    if not (0 <= loss < math.inf and 0 <= top1 <= top5 <= samples < math.inf):  # nan is in no range
        raise DamagedCheckpoint("its sums of the epoch are not those of losses and images")


def _difference(saved: Any, given: Any) -> str:
    """Say in which entry two values differ, or show both."""
    if isinstance(saved, dict) and isinstance(given, dict):
        for key in sorted({*saved, *given}, key=str):
            if saved.get(key) != given.get(key):
                return f"{key} {shown(saved.get(key))}, this run has {shown(given.get(key))}"
    if isinstance(saved, list) and isinstance(given, list):
        if len(saved) != len(given):
            return f"{len(saved)} entries, this run has {len(given)}"
        number = next(number for number, pair in enumerate(zip(saved, given, strict=True)) if pair[0] != pair[1])
        return f"entry {number} is {shown(saved[number])}, this run has {shown(given[number])}"
    return f"{shown(saved)}, this run has {shown(given)}"


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]


def _choice(values: list[int]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}" if len(values) > 1 else str(values[0])
