"""Unreadable images: their limit, their replacement in a batch, and the messages about them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from fractions import Fraction
from typing import TYPE_CHECKING

import torch

from zerovision.training.base.errors import AgreedError, UserError
from zerovision.training.base.units import plural
from zerovision.training.data.reading.files import ImageError
from zerovision.training.world.collectives import gather_objects
from zerovision.training.world.world import World

if TYPE_CHECKING:
    from zerovision.training.data.datasets import ImageDataset
    from zerovision.training.data.loader import Loader

PATHS_IN_ERROR = 3
MAX_FILES_LISTED = 20
FILES_PER_MESSAGE = 500  # a path may be 4,096 bytes long, and the size of messages is limited


def bad_image_budget(share: Fraction, total: int) -> int:
    """Return how many of `total` images may be unreadable: the share rounded down, at least 1; 0 if the share is 0."""
    return max(1, int(share * total)) if share else 0


def read_or_replace(
    read: Callable[[int], torch.Tensor], index: int, dataset: ImageDataset
) -> tuple[torch.Tensor, ImageError | None]:
    """Read an image, or replace it with the next readable one, so that BatchNorm sees a real image in its slot.

    If the image was replaced, also return the error; its slot then gets weight 0. Raise ImageError if no unreadable
    images are allowed, or a UserError if more than `dataset.most_bad` consecutive images are unreadable.
    """
    try:
        return read(index), None
    except ImageError as error:
        if not dataset.most_bad:
            raise
        problem = error
    for distance in range(1, dataset.most_bad + 1):
        with suppress(ImageError):
            return read((index + distance) % len(dataset)), problem
    raise _over_budget(dataset)


def check_budget(bad_images: dict[str, str], dataset: ImageDataset) -> None:
    """Raise UserError if there are more unreadable images than the data set may have."""
    if len(bad_images) > dataset.most_bad:
        raise _over_budget(dataset, [f"{path} ({why})" for path, why in bad_images.items()])


def _over_budget(dataset: ImageDataset, bad: Collection[str] = ()) -> UserError:
    shown = ", ".join(list(bad)[:PATHS_IN_ERROR])
    return UserError(
        f"more than {dataset.most_bad} of {len(dataset)} images cannot be used, which is the limit of --bad-images"
        f"{': ' + shown if shown else ''}. Repair or remove them (scripts/doctor.py --check-data lists all), or allow "
        "a larger share, such as --bad-images skip:0.05."
    )


def check_bad_images(loader: Loader, world: World) -> None:
    """End the run if all ranks together have found more unreadable images than allowed; a collective.

    A loader checks its own rank's images as they are read. An image that could not be read on several ranks or in
    several epochs is counted only once.

    Raises:
        UserError: If the limit is exceeded; raised on all ranks.
    """
    if not loader.dataset.most_bad:  # any unreadable image has already raised an error
        return
    try:
        check_budget(_merged(loader.bad_images, world), loader.dataset)
    except UserError as error:
        raise AgreedError(str(error)) from None


def bad_image_lines(loaders: list[Loader], world: World) -> Iterator[str]:
    """Yield a line about skipped images, and one about unusual images; a collective."""
    bad, noted = [loader.bad_images for loader in loaders], [loader.notes for loader in loaders]
    for noun, what, found in ("unreadable image", "skipped", bad), ("image", "with a note", noted):
        merged = _merged({path: why for one in found for path, why in one.items()}, world)
        if merged:
            shown = ", ".join(f"{path} ({why})" for path, why in sorted(merged.items())[:MAX_FILES_LISTED])
            yield f"{plural(len(merged), noun)} {what}: {shown}{' ...' if len(merged) > MAX_FILES_LISTED else ''}"


def _merged(found: dict[str, str], world: World) -> dict[str, str]:
    """Return the findings of all ranks on every rank; a collective with as many messages as the longest list needs."""
    rows = list(found.items())
    merged: dict[str, str] = {}
    most = max(gather_objects(len(rows), world))
    for start in range(0, most, FILES_PER_MESSAGE):
        parts = gather_objects(rows[start : start + FILES_PER_MESSAGE], world)
        merged |= dict(row for part in parts for row in part)
    return merged
