"""The global batch, and its division into micro-batch x accumulation steps x ranks.

This module does not import torch, because launchers also use it.
"""

from __future__ import annotations

import dataclasses

from zerovision.training.base.errors import UserError, either, one_line
from zerovision.training.base.settings import FEWEST_IMAGES
from zerovision.training.base.units import plural
from zerovision.training.config import FIELDS, FLAG_OF, TrainConfig
from zerovision.training.tasks.settings import asked_task
from zerovision.training.world.launchers import data_ranks

# The global batch of `--batch-size auto` without `--global-batch`: the same on any hardware, so that a learning rate
# keeps its meaning, and about the size for which the default rate is chosen.
USUAL_GLOBAL_BATCH = 256
FEWEST_STEPS = 20  # per epoch: a small data set has a smaller global batch, about a power of two
# On a CPU rank: this many images keep a core busy (benchmarks/results/scaling_2cpu_2026-11-21.md), and more images only
# take more memory.
MOST_IMAGES_ON_CPU = 64
MOST_RANKS = 100_000  # largest number of ranks that a message suggests


def usual_global_batch(ranks: int, training_images: int = 0) -> int:
    """Return the global batch nearest to `USUAL_GLOBAL_BATCH` with a multiple of 8 images per rank.

    If there are few training images, the global batch is smaller.

    Args:
        ranks: number of ranks that share the global batch.
        training_images: number of training images, which should fill at least `FEWEST_STEPS` batches if 8 images per
            rank allow it; 0 if the number does not matter.
    """
    unit = FEWEST_IMAGES * ranks
    most = (training_images - 1) // (FEWEST_STEPS - 1) if training_images else 2 * USUAL_GLOBAL_BATCH * ranks
    wanted = min(USUAL_GLOBAL_BATCH, 2 ** (max(most, 1).bit_length() - 1))
    nearest = max(1, round(wanted / unit)) * unit
    return nearest if nearest <= most else max(1, most // unit) * unit


def few_steps_note(global_batch: int, ranks: int, training_images: int) -> str:
    """Return a note that says what to type if an epoch has fewer than `FEWEST_STEPS` batches, otherwise ''."""
    steps = -(-training_images // global_batch)
    if steps >= FEWEST_STEPS:
        return ""
    better = usual_global_batch(ranks, training_images)
    cure = f"--global-batch {better} raises that to {-(-training_images // better)}"
    if better >= global_batch:
        cure = f"fewer ranks, or a --batch-size below {FEWEST_IMAGES}, raise that"
    return f"; an epoch has only {steps} updates: {cure}"


def micro_batches(global_batch: int, ranks: int, most: int = 0) -> list[int]:
    """Return the multiples of 8 that divide a rank's share of the global batch, in ascending order.

    Args:
        global_batch: number of images per update, over all ranks.
        ranks: number of ranks that share the global batch.
        most: largest allowed micro-batch; 0 for no limit other than that of `--batch-size`.

    Raises:
        UserError: if there is no such multiple; the message suggests the nearest global batches that have one.
    """
    share, rest = divmod(global_batch, ranks)
    most_steps = FIELDS["gradient_accumulation_steps"].metadata["high"]
    largest = min(share, FIELDS["batch_size"].metadata["high"])
    if rest or share % FEWEST_IMAGES:
        raise UserError(
            f"--batch-size auto: {ranks} ranks cannot share a global batch of {global_batch} in multiples of "
            f"{FEWEST_IMAGES} images: use --global-batch {nearest_multiples(global_batch, FEWEST_IMAGES * ranks)}."
        )
    multiples = range(FEWEST_IMAGES, largest + 1, FEWEST_IMAGES)
    found = [size for size in multiples if share % size == 0 and share // size <= most_steps]
    if not found:
        raise UserError(
            f"--batch-size auto: a global batch of {global_batch} on {ranks} ranks needs more than {most_steps} "
            f"accumulation steps: use --global-batch {nearest_multiples(global_batch, most_steps * ranks)}."
        )
    return [size for size in found if not most or size <= most] or found[:1]


def largest_divisor(share: int, most: int) -> int:
    """Return the largest number of images up to `most` that divides a rank's share, a multiple of 8 if possible."""
    divisors = [size for size in range(1, min(share, most) + 1) if share % size == 0]
    return max((size for size in divisors if size % FEWEST_IMAGES == 0), default=divisors[-1])


def divided(config: TrainConfig, batch_size: int, global_batch: int, ranks: int) -> TrainConfig:
    """Return the configuration with this micro-batch, which must divide a rank's share, and its accumulation steps."""
    steps = global_batch // ranks // batch_size
    return dataclasses.replace(config, batch_size=batch_size, gradient_accumulation_steps=steps)


def in_chunks(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the chunks of its task, if any, as its micro-batches, or raise a UserError."""
    images = config.micro_batch * config.gradient_accumulation_steps
    for name, chunk in asked_task(config).chunks().items():
        if config.global_batch:  # which determines the number of chunks
            return dataclasses.replace(config, batch_size=chunk, gradient_accumulation_steps=1)
        if images % chunk:
            raise UserError(
                f"{FLAG_OF[name]} {chunk} does not divide the {images} images per rank: use "
                f"{_divisors(images, FIELDS[name].metadata['high'])}."
            )
        return divided(config, chunk, images, 1)
    return config


def check_division(config: TrainConfig, ranks: int) -> None:
    """Raise a UserError if this many ranks cannot form the mesh of a new run, or cannot share its global batch."""
    ranks = data_ranks(ranks, config.mesh)
    if config.batch_size == "auto":
        micro_batches(config.global_batch or usual_global_batch(ranks), ranks)
    else:
        divide_given(config, ranks)


def divide_given(config: TrainConfig, ranks: int) -> TrainConfig:
    """Return the configuration of a new run with the accumulation steps for `--global-batch`, if it is given.

    Raises:
        UserError: if ranks times batch size does not divide the global batch, or if a different number of accumulation
            steps is given.
    """
    if not config.global_batch:
        return config
    nearest = f", or --global-batch {nearest_multiples(config.global_batch, config.micro_batch * ranks)}"
    shared = divide(config, config.global_batch, ranks, "--global-batch", nearest)
    if config.gradient_accumulation_steps not in (1, shared.gradient_accumulation_steps):
        raise UserError(
            f"--gradient-accumulation-steps {config.gradient_accumulation_steps}: --global-batch {config.global_batch} "
            f"needs {shared.gradient_accumulation_steps} at this --batch-size: leave it out."
        )
    return shared


def divide(config: TrainConfig, global_batch: int, ranks: int, whose: str, cure: str = "") -> TrainConfig:
    """Return the configuration, whose batch size is a number, with the accumulation steps for a global batch.

    Args:
        config: the configuration.
        global_batch: number of images per update, over all ranks.
        ranks: number of ranks that share the global batch.
        whose: phrase for messages that says where the global batch comes from.
        cure: advice for the message about a number of ranks that does not divide the global batch, after the advice to
            change this number.

    Raises:
        UserError: if ranks times batch size does not divide the global batch; the message suggests values that do.
    """
    if global_batch % ranks:
        cures = f"use {_divisors(global_batch, MOST_RANKS)} ranks{cure}"
        raise UserError(f"{ranks} ranks cannot share {whose} {global_batch} evenly: {cures}.")
    per_rank, batch_size = global_batch // ranks, config.micro_batch
    product = f"--batch-size {batch_size} x {plural(ranks, 'rank')}"
    if per_rank % batch_size:
        raise UserError(
            f"{product} does not divide {whose} {global_batch}: "
            f"use --batch-size {_divisors(per_rank, FIELDS['batch_size'].metadata['high'])}."
        )
    accumulation_steps, most = per_rank // batch_size, FIELDS["gradient_accumulation_steps"].metadata["high"]
    if accumulation_steps > most:
        raise UserError(
            f"{product} needs {accumulation_steps} accumulation steps for {whose} {global_batch}, more than {most}: "
            "use a larger --batch-size."
        )
    return divided(config, batch_size, global_batch, ranks)


def _divisors(number: int, most: int) -> str:
    """Return the divisors of a number up to `most`, as text."""
    return one_line(either(str(divisor) for divisor in range(1, min(number, most) + 1) if number % divisor == 0))


def nearest_multiples(number: int, unit: int) -> str:
    """Return the multiples of `unit` just below and above `number`, as text."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"
