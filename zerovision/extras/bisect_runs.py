"""The first step at which two runs differ that should be equal, and what differs between them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerovision.delivery.trained_model import find_run, read_json
from zerovision.extras.settings import BisectSettings
from zerovision.training.base.errors import UserError, one_line, shown
from zerovision.training.base.run_folder import CONFIG, ENVIRONMENT, IMAGES, METRICS
from zerovision.training.config import FLAG_OF
from zerovision.training.data.image_list import read_image_list
from zerovision.training.observe.step_hashes import HASHES, OF_LEAF

OF_NO_ACCOUNT = (
    *("run_name", "log_dir", "resume", "progress", "tensorboard", "report", "log_every_steps"),
    *("log_hashes", "audit"),
    "command",
)


def run(settings: BisectSettings) -> int:
    """Print what was found."""
    found = compare(find_run(settings.first), find_run(settings.second))
    for line in lines_of(found):
        print(line)
    return 1 if found.step else 0


@dataclass(frozen=True)
class Difference:
    """What comparing two runs has found.

    Attributes:
        compared: steps of which both have hashes.
        last_equal: the last of them before the first difference, 0 if there is none.
        step: the first at which they differ, 0 if they do not.
        images_differ: whether the images of that step differ; None if the runs did not note the same leaves.
        leaves: those that differ in that step, in words, from rank and number to what is other about each.
        leaves_compared: of how many.
        tensors: names of the parameters that differ after it, in the network's order.
        parameters: how many there are.
        settings: lines about configuration, surroundings and images, whether or not a step differs.
    """

    compared: int
    last_equal: int
    step: int = 0
    images_differ: bool | None = None
    leaves: list[str] = field(default_factory=list)
    leaves_compared: int = 0
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
        pairs = _pairs_of_leaves(one, other)
        images_differ = any(of_one["images"] != of_other["images"] for of_one, of_other in pairs) if pairs else None
        leaves = differing_leaves(pairs)
        tensors = [name for name, value in one["weights"].items() if other["weights"][name] != value]
        if tensors or leaves:
            of_leaves = (images_differ, leaves, len(pairs))
            return Difference(len(steps), last_equal, step, *of_leaves, tensors, len(one["weights"]), settings)
        last_equal = step
    return Difference(len(steps), last_equal, settings=settings)


def _pairs_of_leaves(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the same leaves of a step in two runs; none if it has more of them in one."""
    leaves = [side.get("leaves", []) for side in (one, other)]
    return [*zip(*leaves, strict=True)] if len(leaves[0]) == len(leaves[1]) else []


def differing_leaves(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Return the leaves that differ, of the same leaves of a step as two lines of hashes have them, in words."""
    found = (_differing(number, *pair) for number, pair in enumerate(pairs, start=1))
    return [words for words in found if words]


def _differing(number: int, one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return what is other about a leaf in words: the first in the order in which it is computed; '' for nothing."""
    what = next((kind for kind in OF_LEAF if kind in one.keys() & other.keys() and one[kind] != other[kind]), "")
    ranks = " | ".join(map(str, dict.fromkeys((one["rank"], other["rank"]))))
    same = {"images": "", "outputs": " of the same images", "gradients": " of the same images and outputs"}
    return what and f"rank {ranks} (leaf {number}): other {what}{same[what]}"


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
        if found.leaves:
            count = f"{len(found.leaves)} of {found.leaves_compared}"
            more = "; ..." if len(found.leaves) > 3 else ""
            yield f"leaves       {count} differ: {'; '.join(found.leaves[:3])}{more}"
        elif found.leaves_compared:
            yield f"leaves       all {found.leaves_compared} are equal: what differs is their sum, or the update"
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
