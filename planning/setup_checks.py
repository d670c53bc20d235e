"""What the dry run of a large run checks: the order of its data, and what the set-up of chosen ranks came to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planning.doctor.table import Row
from planning.machines import Gpu
from planning.memory import FLOAT32_BYTES
from training.checkpoint.manifest import MOST_SHARDS
from training.data.sampler import BatchPlan, EvaluationPlan
from training.observe.units import format_bytes

MOST_KEYS = 200_000  # micro-batches of an epoch that are looked at
MUCH_PADDING, MANY_FILES = 0.1, 4096
UNEVEN, NOTABLE_ELEMENTS = 2, 10_000_000  # of the largest part, against an equal one


@dataclass(frozen=True)
class RankSetUp:
    """What the set-up of one rank came to.

    Attributes:
        rank: of the run.
        engine: that was built.
        boxes: its parts of the parameters by name, each the index of a box.
        parameters: elements of all parameters.
        values_per_parameter: in a checkpoint: the weight and its moments.
        held_bytes: weights, gradients, moments and buffers that it has in memory before the first step.
        file_bytes: of its file of a checkpoint.
    """

    rank: int
    engine: str
    boxes: dict[str, list[tuple[slice, ...]]]
    parameters: int
    values_per_parameter: int
    held_bytes: int
    file_bytes: int

    @property
    def elements(self) -> int:
        """Parameters of which this rank keeps the state."""
        return sum(_elements(box) for boxes in self.boxes.values() for box in boxes)


def check_order(plan: BatchPlan) -> Row:
    """Count every rank's samples of an epoch, or of its first and last steps: each must be there once."""
    leaves = plan.world_size * plan.accumulation_steps
    steps = [*range(plan.steps_per_epoch)]
    if len(steps) * leaves > MOST_KEYS:
        steps = sorted({0, plan.steps_per_epoch - 1})
    counted = np.zeros(plan.num_samples, dtype=np.int64)
    for step in steps:
        for leaf in range(leaves):
            key = plan.micro_batch(0, step, leaf % plan.accumulation_steps, leaf // plan.accumulation_steps)
            np.add.at(counted, key.indices, (key.weights > 0).astype(np.int64))
    expected = sum(plan.real_samples(step) for step in steps)
    padding = 1 - plan.num_samples / (plan.steps_per_epoch * plan.global_batch)
    found = (
        f"{plan.num_samples} images in {plan.steps_per_epoch} steps of {plan.global_batch}, {padding:.1%} padding; "
        f"steps counted over all ranks: {len(steps)}"
    )
    one_each = plan.repeats == 1 and not plan.labels
    if counted.sum() != expected or (one_each and counted.max() > 1):
        return Row("data order", "wrong", f"{found}: {counted.sum()} samples instead of {expected}", "report this")
    if padding > MUCH_PADDING:
        fits = max(plan.num_samples // leaves, 1)
        return Row(
            "data order", "warning", found, f"--batch-size {fits} or fewer ranks: padding is computed for nothing"
        )
    return Row("data order", "ok", found)


def check_evaluation(images: int, batch_size: int, world: int) -> Row:
    """Count the batches that every rank evaluates."""
    plan = EvaluationPlan(images, batch_size, world)
    real = (
        sum(float(key.weights.sum()) for rank in range(world) for key in plan.keys(rank)) if images < 10**6 else images
    )
    found = f"{images} images in {plan.batches_per_rank} batches per rank"
    return Row("evaluation", "ok" if real == images else "wrong", found)


def check_parts(found: Sequence[RankSetUp], world: int) -> Row:
    """Compare the ranks' parts of the parameters: none may be in two, and with all ranks none in no part."""
    parameters, parts = found[0].parameters, [one.elements for one in found]
    text = f"{parameters} parameters, {min(parts)} to {max(parts)} on a rank"
    overlaps = any(
        all(_overlap(a, b) for a, b in zip(box, other, strict=True))
        for number, one in enumerate(found)
        for rest in found[number + 1 :]
        for name in one.boxes.keys() & rest.boxes.keys()
        for box in one.boxes[name]
        for other in rest.boxes[name]
    )
    if overlaps or (len(found) == world and sum(parts) != parameters):
        return Row("parts of the state", "wrong", f"{text}: they do not add up", "report this")
    if max(parts) > UNEVEN * parameters / world and max(parts) > NOTABLE_ELEMENTS:
        cure = "another --engine divides more evenly"
        return Row("parts of the state", "warning", f"{text}: uneven, an equal part is {parameters // world}", cure)
    return Row("parts of the state", "ok", text)


def check_files(found: Sequence[RankSetUp], world: int) -> Row:
    """Count a checkpoint's files and bytes."""
    sizes = [one.file_bytes for one in found]
    state = FLOAT32_BYTES * found[0].values_per_parameter
    besides = statistics.mean(one.file_bytes - state * one.elements for one in found)  # buffers and headers
    total = round(besides * world + state * found[0].parameters)
    text = f"{world + 1} files, {format_bytes(min(sizes))} to {format_bytes(max(sizes))} each, {format_bytes(total)}"
    if world > MOST_SHARDS:
        return Row("checkpoint", "wrong", text, f"at most {MOST_SHARDS} ranks")
    if world > MANY_FILES:
        return Row("checkpoint", "warning", text, "a larger --save-every-minutes spares the file system")
    return Row("checkpoint", "ok", text)


def check_memory(found: Sequence[RankSetUp], gpu: Gpu | None) -> Row:
    """Compare what a rank has in memory before its first step with a GPU's, if one is given."""
    held = max(one.held_bytes for one in found)
    text = f"{format_bytes(held)} of weights, gradients and optimizer state on a rank before its first step"
    if gpu is None:
        return Row("memory", "ok", text)
    text += f", of {format_bytes(gpu.memory_bytes)} on {gpu.name}"
    if held > gpu.memory_bytes:
        return Row("memory", "wrong", text, "--strategy fsdp_stage3, or --offload all")
    return Row("memory", "ok", text)


def _elements(box: tuple[slice, ...]) -> int:
    return int(np.prod([side.stop - side.start for side in box], dtype=np.int64))


def _overlap(one: slice, other: slice) -> bool:
    return one.start < other.stop and other.start < one.stop
