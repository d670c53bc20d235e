"""Finds the first step at which two supposedly equal runs differ, and what differs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zerovision.delivery.trained_model import find_run, read_json
from zerovision.extras.settings import BisectSettings
from zerovision.training.base.errors import UserError, one_line, shown
from zerovision.training.base.run_folder import CONFIG, ENVIRONMENT, IMAGES, METRICS
from zerovision.training.config import FLAG_OF
from zerovision.training.data.image_list import read_image_list
from zerovision.training.observe.step_hashes import HASHES, OF_LEAF

OF_NO_ACCOUNT = (
    *("run_name", "log_dir", "resume", "progress", "tensorboard", "report", "log_every_steps"),
    *("log_hashes", "audit", "command"),
)


def run(settings: BisectSettings) -> int:
    """Compare the runs and print the result."""
    found = compare(find_run(settings.first), find_run(settings.second))
    for line in lines_of(found):
        print(line)
    return 1 if found.step else 0


class StepDifference(NamedTuple):
    """How the hashes of one step differ between two runs."""

    images_differ: bool | None  # None if the runs have different numbers of leaves
    leaves: list[str]  # descriptions of those that differ: rank, number and what differs
    leaves_compared: int
    tensors: list[str]  # names of the parameters that differ after the step, in the network's order
    parameters: int  # number of parameters

    @property
    def differs(self) -> bool:
        """Whether anything differs."""
        return bool(self.leaves or self.tensors)


class Difference(NamedTuple):
    """The result of comparing two runs."""

    compared: int  # number of steps for which both runs have hashes
    last_equal: int  # the last compared step before the first difference, or 0
    settings: list[str]  # differences in configuration, environment and images, even if no step differs
    step: int = 0  # the first step at which the runs differ, or 0
    found: StepDifference | None = None  # at that step


def compare(first: Path, second: Path) -> Difference:
    """Compare two runs by the hashes that `--log-hashes` wrote; for a repeated step, the later line is used.

    Args:
        first: folder of the first run.
        second: folder of the second run.

    Raises:
        UserError: if a run has no hashes, the runs share no step with hashes, or their networks differ.
    """
    sides = [read_hashes(first), read_hashes(second)]
    for run, hashes in zip((first, second), sides, strict=True):
        if not hashes:
            raise UserError(f"run {run.name} has no hashes: train it with --log-hashes 1 (or every N steps).")
    steps = sorted(sides[0].keys() & sides[1].keys())
    if not steps:
        raise UserError(
            f"{first.name} and {second.name} have no step with hashes in common: train both with the same --log-hashes."
        )
    settings, last_equal = [*_other_differences(first, second)], 0
    for step in steps:
        one, other = sides[0][step], sides[1][step]
        if one["weights"].keys() != other["weights"].keys():
            raise UserError(f"{first.name} and {second.name} train different networks: parameters differ by name.")
        found = compare_step(one, other)
        if found.differs:
            return Difference(len(steps), last_equal, settings, step, found)
        last_equal = step
    return Difference(len(steps), last_equal, settings)


def compare_step(one: Mapping[str, Any], other: Mapping[str, Any]) -> StepDifference:
    """Compare the hashes of a step in two runs; leaves are compared only if the runs have the same number of leaves."""
    leaves = [side.get("leaves", []) for side in (one, other)]
    pairs = [*zip(*leaves, strict=True)] if len(leaves[0]) == len(leaves[1]) else []
    words = [_differing(number, *pair) for number, pair in enumerate(pairs, start=1)]
    images_differ = any(of_one["images"] != of_other["images"] for of_one, of_other in pairs) if pairs else None
    tensors = [name for name, value in one["weights"].items() if other["weights"].get(name) != value]
    return StepDifference(images_differ, [*filter(None, words)], len(pairs), tensors, len(one["weights"]))


def _differing(number: int, one: dict[str, Any], other: dict[str, Any]) -> str:
    """Describe the first difference between two leaves, in the order of computation; '' if they do not differ."""
    what = next((kind for kind in OF_LEAF if kind in one.keys() & other.keys() and one[kind] != other[kind]), "")
    ranks = " | ".join(map(str, dict.fromkeys((one["rank"], other["rank"]))))
    same = {"images": "", "outputs": " of the same images", "gradients": " of the same images and outputs"}
    return what and f"rank {ranks} (micro-batch {number}): different {what}{same[what]}"


def lines_of(difference: Difference) -> Iterator[str]:
    """Yield the lines to print."""
    last, found = difference.last_equal, difference.found
    if found is None:
        yield f"equal        at all {difference.compared} steps with hashes, up to step {last}"
    else:
        yield f"equal        up to step {last}" if last else "equal        at no step with hashes"
        images = {None: "images unknown", True: "different images", False: "the same images"}[found.images_differ]
        names = ", ".join(found.tensors[:3]) + (", ..." if len(found.tensors) > 3 else "")
        tensors = f"{len(found.tensors)} of {found.parameters} parameters differ after it"
        yield f"differ       at step {difference.step}: {images}; {tensors}" + (f": {names}" if names else "")
        if found.leaves:
            count = f"{len(found.leaves)} of {found.leaves_compared}"
            more = "; ..." if len(found.leaves) > 3 else ""
            yield f"batches      {count} differ: {'; '.join(found.leaves[:3])}{more}"
        elif found.leaves_compared:
            yield f"batches      all {found.leaves_compared} are equal: their sum or the update differs"
    other = difference.settings or ["no difference in the recorded settings, versions and images"]
    yield from (f"other        {line}" for line in other)


def read_hashes(run: Path) -> dict[int, dict[str, Any]]:
    """Return a run's hashes by step, the later ones for a step that was trained twice, or raise a UserError."""
    found = {}
    try:
        for line in (run / METRICS).read_text(encoding="utf-8").splitlines():
            if HASHES in line and (values := json.loads(line)).get("kind") == HASHES:
                found[int(values["step"])] = values
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run / METRICS} cannot be read: {one_line(error)}.") from None
    return found


def _other_differences(first: Path, second: Path) -> Iterator[str]:
    """Yield a line for each setting and fact that differs, and one line if the runs record different images."""
    for name, prefix in ((CONFIG, "--"), (ENVIRONMENT, "")):
        one, other = (_flat(read_json(run / name)) for run in (first, second))
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key) and key not in OF_NO_ACCOUNT:
                label = FLAG_OF.get(key, key) if prefix else key
                yield f"{label}: {shown(one.get(key))} | {shown(other.get(key))}"
    images, others = ({image.path: image for image in read_image_list(run / IMAGES)} for run in (first, second))
    if changed := sum(images.get(path) != others.get(path) for path in images.keys() | others.keys()):
        yield f"images of training: {changed} are in only one run, or differ in content or label"


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return flat
