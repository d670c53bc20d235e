"""The images of an update over all ranks, and how they are divided: micro-batch x accumulation steps x ranks.

This module imports no torch: launchers use it too.
"""

from __future__ import annotations

import dataclasses

from training.config import FIELDS, TrainConfig
from training.errors import UserError
from training.model_fields import FEWEST_IMAGES

# The global batch of `--batch-size auto` without `--global-batch`: the same on any hardware, so that a learning rate
# keeps its meaning, and about what the default rate is for.
USUAL_GLOBAL_BATCH = 256
# Of CPU ranks: a core is full with it (benchmarks/results/scaling_2cpu_2026-11-21.md), more takes memory alone.
MOST_IMAGES_ON_CPU = 64


def usual_global_batch(ranks: int) -> int:
    """Return the multiple of 8 images for each rank that is nearest to `USUAL_GLOBAL_BATCH`."""
    images = FEWEST_IMAGES * ranks
    return max(1, round(USUAL_GLOBAL_BATCH / images)) * images


def micro_batches(global_batch: int, ranks: int, most: int = 0) -> list[int]:
    """Return the multiples of 8 that divide a rank's share of the global batch, ascending.

    Args:
        global_batch: images of an update over all ranks.
        ranks: that share it.
        most: the largest that is wanted; 0 for no limit but that of `--batch-size`.

    Raises:
        UserError: if there is none, with the nearest global batches that have one.
    """
    share, rest = divmod(global_batch, ranks)
    most_steps = FIELDS["gradient_accumulation_steps"].metadata["high"]
    largest = min(share, FIELDS["batch_size"].metadata["high"])
    if rest or share % FEWEST_IMAGES:
        raise UserError(
            f"--batch-size auto: {ranks} ranks cannot share a global batch of {global_batch} in multiples of "
            f"{FEWEST_IMAGES} images: use --global-batch {nearest_multiples(global_batch, FEWEST_IMAGES * ranks)}."
        )
    found = [
        size
        for size in range(FEWEST_IMAGES, largest + 1, FEWEST_IMAGES)
        if share % size == 0 and share // size <= most_steps
    ]
    if not found:
        raise UserError(
            f"--batch-size auto: a global batch of {global_batch} on {ranks} ranks takes more than {most_steps} "
            f"accumulation steps: use --global-batch {nearest_multiples(global_batch, most_steps * ranks)}."
        )
    return [size for size in found if not most or size <= most] or found[:1]


def largest_divisor(share: int, most: int) -> int:
    """Return the largest number of images up to `most` that divides a rank's share, a multiple of 8 if there is one."""
    divisors = [size for size in range(1, min(share, most) + 1) if share % size == 0]
    return max((size for size in divisors if size % FEWEST_IMAGES == 0), default=divisors[-1])


def divided(config: TrainConfig, batch_size: int, global_batch: int, ranks: int) -> TrainConfig:
    """Return the configuration with a micro-batch, which divides a rank's share, and its accumulation steps."""
    steps = global_batch // ranks // batch_size
    return dataclasses.replace(config, batch_size=batch_size, gradient_accumulation_steps=steps)


def nearest_multiples(number: int, unit: int) -> str:
    """Return the multiples of a number of images just below and above another, in words."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"
