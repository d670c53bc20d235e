"""The first step at which two runs differ that should be equal, and what differs between them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delivery.trained_model import read_json
from training.base.errors import UserError, one_line, shown
from training.base.run_folder import CONFIG, ENVIRONMENT, IMAGES, METRICS
from training.config import FLAG_OF
from training.data.image_list import read_image_list
from training.observe.step_hashes import HASHES

OF_NO_ACCOUNT = (
    *("run_name", "log_dir", "resume", "progress", "tensorboard", "report", "log_every_steps"),
    *("log_hashes", "audit"),
    "command",
)


@dataclass(frozen=True)
class Difference:
    """What comparing two runs has found.

    Attributes:
        compared: steps of which both have hashes.
        last_equal: the last of them before the first difference, 0 if there is none.
        step: the first at which they differ, 0 if they do not.
        images_differ: whether the images of that step differ; None if one of the runs did not note them.
        tensors: names of the parameters that differ after it, in the network's order.
        parameters: how many there are.
        settings: lines about configuration, surroundings and images, whether or not a step differs.
    """

    compared: int
    last_equal: int
    step: int = 0
    images_differ: bool | None = None
    tensors: list[str] = field(default_factory=list)
    parameters: int = 0
    settings: list[str] = field(default_factory=list)


def compare(first: Path, second: Path) -> Difference:
    """Compare two runs by the hashes that `--log-hashes` has written; the later line of a step counts.

    Args:
        first: folder of a run.
        second: folder of the run to compare.

    Raises:
        UserError: if a run has no hashes, both have none of the same step, or they are of other networks.
    """
    sides = [read_hashes(first), read_hashes(second)]
    for run, hashes in zip((first, second), sides, strict=True):
        if not hashes:
            raise UserError(f"run {run.name} has no hashes: train it with --log-hashes 1 (or every N steps).")
    steps = sorted(sides[0].keys() & sides[1].keys())
    if not steps:
        raise UserError(
            f"{first.name} and {second.name} have hashes of no step in common: train both with the same --log-hashes."
        )
    settings = [*_of_settings(first, second), *_of_images(first, second)]
    last_equal = 0
    for step in steps:
        one, other = sides[0][step], sides[1][step]
        if one["weights"].keys() != other["weights"].keys():
            raise UserError(f"{first.name} and {second.name} train other networks: their parameters have other names.")
        images = [side.get("images") for side in (one, other)]
        images_differ = None if None in images else images[0] != images[1]
        tensors = [name for name, value in one["weights"].items() if other["weights"][name] != value]
        if tensors or images_differ:
            count = len(one["weights"])
            return Difference(len(steps), last_equal, step, images_differ, tensors, count, settings)
        last_equal = step
    return Difference(len(steps), last_equal, settings=settings)


def lines_of(found: Difference) -> Iterator[str]:
    """Yield what to print."""
    if not found.step:
        yield f"equal        at all {found.compared} steps with hashes, up to step {found.last_equal}"
    else:
        yield (
            f"equal        up to step {found.last_equal}" if found.last_equal else "equal        at no step with hashes"
        )
        images = {None: "images unknown", True: "other images", False: "the same images"}[found.images_differ]
        names = ", ".join(found.tensors[:3]) + (", ..." if len(found.tensors) > 3 else "")
        tensors = f"{len(found.tensors)} of {found.parameters} parameters differ after it"
        yield f"differ       at step {found.step}: {images}; {tensors}" + (f": {names}" if names else "")
    yield from (f"other        {line}" for line in found.settings or ["no setting, version or image that a run notes"])


def read_hashes(run: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of hashes of a run by step, the later one of a step that was trained twice.

    Raises:
        UserError: if metrics.jsonl cannot be read.
    """
    found = {}
    try:
        for line in (run / METRICS).read_text(encoding="utf-8").splitlines():
            if HASHES in line and (values := json.loads(line)).get("kind") == HASHES:
                found[int(values["step"])] = values
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run / METRICS} cannot be read: {one_line(error)}.") from None
    return found


def _of_settings(first: Path, second: Path) -> Iterator[str]:
    for name, prefix in ((CONFIG, "--"), (ENVIRONMENT, "")):
        one, other = (_flat(read_json(run / name)) for run in (first, second))
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key) and key not in OF_NO_ACCOUNT:
                label = FLAG_OF.get(key, key) if prefix else key
                yield f"{label}: {shown(one.get(key))} | {shown(other.get(key))}"


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return flat


def _of_images(first: Path, second: Path) -> Iterator[str]:
    """Yield a line if the runs note other images."""
    one, other = ({image.path: image for image in read_image_list(run / IMAGES)} for run in (first, second))
    changed = sum(one.get(path) != other.get(path) for path in one.keys() | other.keys())
    if changed:
        yield f"images of training: {changed} are in one run alone, or have another content or label there"
