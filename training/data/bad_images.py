"""Images that all ranks together could not read: how many there may be, and the lines that name them."""

from __future__ import annotations

from collections.abc import Iterator

from training.data.loader import EvaluationLoader, TrainLoader
from training.errors import AgreedError, UserError
from training.parallel.collectives import gather_objects
from training.parallel.exchange import list_of, row_of, text, whole_number
from training.parallel.world import World

MAX_FILES_LISTED = 20
FILES_PER_MESSAGE = 500  # paths may be of 4,096 bytes, and messages are bounded


def check_bad_images(loader: TrainLoader | EvaluationLoader, world: World) -> None:
    """End the run if all ranks together have found more unreadable images than allowed; a collective.

    A loader checks its own rank's images as they come. An image that several ranks, or several epochs, could not read
    counts once.

    Raises:
        UserError: on all ranks.
    """
    if not loader.most_bad:  # the first one was an error
        return
    try:
        loader.check_number(_together(loader.bad_images, world))
    except UserError as error:
        raise AgreedError(str(error)) from None


def bad_image_lines(loaders: list[TrainLoader | EvaluationLoader], world: World) -> Iterator[str]:
    """Yield a line on the images that were passed over, and one on those that are odd; a collective."""
    yield from _line("unreadable image(s) passed over", [loader.bad_images for loader in loaders], world)
    yield from _line("image(s) with a note", [loader.notes for loader in loaders], world)


def _line(title: str, found: list[dict[str, str]], world: World) -> Iterator[str]:
    merged = _together({path: why for one in found for path, why in one.items()}, world)
    if merged:
        shown = [f"{path} ({why})" for path, why in sorted(merged.items())[:MAX_FILES_LISTED]]
        yield f"{len(merged)} {title}: {', '.join(shown)}{' ...' if len(merged) > MAX_FILES_LISTED else ''}"


def _together(found: dict[str, str], world: World) -> dict[str, str]:
    """Return what all ranks have found, on every rank; a collective of as many messages as the longest list needs."""
    rows = list(found.items())
    merged: dict[str, str] = {}
    most = max(gather_objects(len(rows), whole_number, world))
    for start in range(0, most, FILES_PER_MESSAGE):
        parts = gather_objects(rows[start : start + FILES_PER_MESSAGE], list_of(row_of(text, text)), world)
        merged |= dict(row for part in parts for row in part)
    return merged
