"""Divides a table of images into training, validation and test parts, and sorts each part into reading order.

The same images lead to the same training run, no matter how they are listed and in which order: paths or groups,
classes and the split seed determine which images are held out. Folds are made as in scikit-learn's
StratifiedGroupKFold: the largest groups are assigned first, each to the fold with the fewest images of its classes.
Neither groups nor files with identical contents are ever divided between folds.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from zerovision.training.base.errors import UserError, shown
from zerovision.training.data import DataOptions
from zerovision.training.data.class_names import number_classes, rarest_classes
from zerovision.training.data.images import Images, pieces
from zerovision.training.data.parts import CLASSES_ANYWAY, PARTS, TRAIN, VAL, parts_of_splits
from zerovision.training.data.reading.files import ImageError

TOLERANCE = 0.1  # allowed deviation, as a share of the expected number of held-out images, plus one image


def with_classes(images: Images, class_names: Sequence[str], where: str) -> Images:
    """Return the images with class names as labels, in the order of the class indices; see `number_classes`."""
    names, numbers = number_classes(images.words["label"], class_names, where)
    return images.renamed("label", {label: names[number] for label, number in numbers.items()}, names)


def in_parts(images: Images, options: DataOptions) -> Images:
    """Return the images with their splits renamed to `PARTS`; raise UserError if a split is unknown."""
    return images.renamed("part", parts_of_splits(images.words["part"], options), PARTS)


def parts_there(images: Images) -> list[str]:
    """Return the parts that contain images, in the order of `PARTS`."""
    return [PARTS[number] for number in np.unique(images["part"])]


def divided(images: Images, options: DataOptions) -> list[Images]:
    """Return the training, validation and test images, each ordered by class, then by path.

    Weights are scaled so that their mean in the training part is 1, like class weights.

    Raises:
        UserError: If there is no training or validation image, a group is in two parts, or all weights are 0.
    """
    where, part = f"--data {options.data}", images["part"]
    there = parts_there(images)
    if TRAIN not in there:
        raise UserError(f"{where} has no training images: add a folder or a split named train; {CLASSES_ANYWAY}.")
    _check_groups(images, where)
    if VAL not in there:
        rows = np.flatnonzero(part == 0)
        part = part.copy()
        part[rows[_held_out(images, rows, options)]] = 1
    for number, what in enumerate(("training", "validation")):
        if not (part == number).any():
            few = "fewer images or groups than --folds" if options.folds else "only one image or group"
            raise UserError(f"{where}: each class has {few}, so none is left for {what}: add images or a val part.")
    order = _in_order(images)
    parts = [images.take(order[part[order] == number]) for number in range(len(PARTS))]
    if not (mean := math.fsum(parts[0]["weight"]) / len(parts[0])):
        raise UserError(f"{where}: all training images have weight 0.")
    return [replace(part, columns={**part.columns, "weight": part.columns["weight"] / mean}) for part in parts]


def undivided(images: Images, part: str, options: DataOptions) -> Images:
    """Return the images of one of `PARTS`, or all images, in the order of `divided`; raise UserError if there is none.

    Their weights are not scaled.
    """
    order = _in_order(images)
    rows = order[images["part"][order] == PARTS.index(part)] if part in PARTS else order
    if not len(rows):
        raise UserError(f"--data {options.data}: the part {part} is empty: at least one labeled image is needed.")
    return images.take(rows)


def fingerprint(parts: Sequence[Images], names: Iterable[str]) -> str:
    """Return a SHA-256 of the names of classes and labels, and of each image's path, size, label and weight."""
    digest = hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape"))
    for part in parts:
        digest.update(b"\n\n")
        for rows in pieces(part.in_order()):
            facts = (part[name][rows].tolist() for name in ("size", "label", "weight"))
            for path, size, label, weight in zip(part.paths(rows), *facts, strict=True):
                more = f"\0()\0{weight}" if weight != 1 else ""  # since 0.1, for runs with weights
                digest.update(os.fsencode(f"{path}\0{size}\0{label}{more}\n"))
    return digest.hexdigest()


def _in_order(images: Images) -> np.ndarray:
    rows = images.in_order()
    return rows[np.argsort(images["label"][rows], kind="stable")]


def _check_groups(images: Images, where: str) -> None:
    pairs = np.unique(images["group"].astype(np.int64) * len(PARTS) + images["part"])
    groups, parts = np.divmod(pairs, len(PARTS))
    for place in np.flatnonzero(groups[1:] == groups[:-1]):
        if group := images.words["group"][groups[place]]:
            raise UserError(
                f"{where}: the group {shown(group)} is in {PARTS[parts[place]]} and in {PARTS[parts[place + 1]]}: put "
                "the whole group into one, or leave out the column split."
            )


def _held_out(images: Images, rows: np.ndarray, options: DataOptions) -> np.ndarray:
    """Return which rows are held out, bool [n]: a share of each class, or a fold."""
    names = images.words["label"]
    if images.classes is not None:
        names = rarest_classes(names, np.bincount(images["label"][rows], minlength=len(names)).tolist())
    classes = {name: number for number, name in enumerate(sorted({*names}))}
    strata = np.array([classes[name] for name in names], dtype=np.int32)[images["label"][rows]]
    units, name_of = _units(images, rows, options.split_seed)
    if not options.folds:
        return share_held_out(units, strata, options.val_fraction)
    joined = join_copies(units, images["size"][rows], name_of, lambda place: images.content(rows[place]))
    return folds_of(joined, strata, options.folds) == options.fold - 1


def _units(images: Images, rows: np.ndarray, seed: int) -> tuple[np.ndarray, Callable[[int], str]]:
    """Return the hash of each image's unit, and a function that returns the name of the unit.

    A unit is a group, or all images with the same path, and is never divided. In archives, images with the same name
    are separate units.
    """
    groups, apart = images.words["group"], np.zeros(len(rows), dtype=bool)
    alone = np.array([not name for name in groups])[images["group"][rows]]

    def name_of(place: int) -> str:
        row = int(rows[place])
        if not alone[place]:
            return groups[images["group"][row]]
        return images.path(row) + (f"\0{images['file'][row]}\0{images['place'][row]}" if apart[place] else "")

    def names() -> Iterator[str]:
        for place, path in enumerate(images.paths(rows)):
            yield path if alone[place] else name_of(place)

    units = unit_hashes(names(), seed)
    if images.archive is not None and not images.archive.is_of_files:
        hashes, counts = np.unique(units[alone], return_counts=True)
        apart |= alone & np.isin(units, hashes[counts > 1])
        units[apart] = unit_hashes(map(name_of, np.flatnonzero(apart).tolist()), seed)
    return units, name_of


def unit_hashes(names: Iterable[str], seed: int) -> np.ndarray:
    """Return a 64-bit hash of each path or group and the seed, uint64 [N], which determines what is held out."""
    salt = seed.to_bytes(8, "little") if seed else b""
    hashes = (hashlib.blake2b(os.fsencode(name), digest_size=8, salt=salt).digest() for name in names)
    return np.fromiter((int.from_bytes(one, "little") for one in hashes), dtype=np.uint64)


def share_held_out(units: np.ndarray, strata: np.ndarray, fraction: float) -> np.ndarray:
    """Return which images are held out, bool [N].

    `units`, uint64 [N], come from `unit_hashes`; all images of a unit are on the same side. `strata`, int64 [N], are
    the images' classes. A unit with several classes belongs to the most frequent class, or to the first of several
    equally frequent classes.

    A unit is held out if its hash, scaled to 0..1, is below `fraction`. This rule does not depend on other images, so
    adding images moves none of the existing images. It does not depend on the run's seed either, so all runs are
    evaluated on the same images. By chance, however, it could hold out 7 of 11 images. Therefore, if the number of a
    class's held-out units differs from the expected number by more than one unit plus `TOLERANCE`, the units whose
    hashes are nearest to `fraction` are moved; only these units can change sides when images are added. A class with
    two or more units has at least one unit on each side.
    """
    hashes, of_image = np.unique(units, return_inverse=True)
    classes = int(strata.max(initial=0)) + 1
    pairs, counts = np.unique(of_image * classes + strata, return_counts=True)
    unit, stratum = (half.astype(np.int32) for half in np.divmod(pairs, classes))  # saves 8 bytes per pair
    del pairs
    by_unit = np.lexsort((-counts, unit))  # ties stay sorted by class
    stratum_of = stratum[by_unit][np.unique(unit, return_index=True)[1]]
    is_held_out = np.zeros(len(hashes), dtype=bool)
    order = np.argsort(stratum_of, kind="stable")
    for of_class in np.split(order, np.flatnonzero(np.diff(stratum_of[order])) + 1):
        expected = fraction * len(of_class)
        slack = 1 + TOLERANCE * expected
        below = int(np.searchsorted(hashes[of_class] / 2.0**64, fraction))
        found = round(min(max(below, expected - slack), expected + slack))
        is_held_out[of_class[: min(max(found, 1), len(of_class) - 1)]] = True
    return is_held_out[of_image]


def join_copies(
    units: np.ndarray, sizes: np.ndarray, name_of: Callable[[int], str], read: Callable[[int], bytes]
) -> np.ndarray:
    """Return the units, uint64 [N], after joining those of byte-identical files; only files of equal size are read."""
    joined: dict[int, int] = {}
    names: dict[int, str] = {}

    def root(unit: int) -> int:
        while unit in joined:
            unit = joined[unit]
        return unit

    order = np.argsort(sizes, kind="stable")
    for alike in np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1):
        if len(alike) < 2 or (units[alike] == units[alike[0]]).all():
            continue
        first: dict[bytes, int] = {}
        for place in alike.tolist():
            try:
                digest = hashlib.sha256(read(place)).digest()
            except ImageError:  # reported when the image is read for training
                continue
            unit = int(units[place])
            names.setdefault(unit, name_of(place))
            one, other = sorted((root(unit), root(first.setdefault(digest, unit))), key=names.__getitem__)
            if one != other:
                joined[other] = one
    units = units.copy()
    for place in np.flatnonzero(np.isin(units, np.array([*joined], dtype=np.uint64))).tolist():
        units[place] = root(int(units[place]))
    return units


def folds_of(units: np.ndarray, strata: np.ndarray, folds: int) -> np.ndarray:
    """Return the fold of each image, int64 [N], counted from 0, given its unit (uint64 [N]) and its class (int64 [N]).

    All images of a unit are in the same fold. Within each class, the units that consist of a single image are sorted by
    hash and cut into consecutive runs, one per fold, so that when images are added, only images at the ends of a run
    move to a different fold.
    """
    hashes, of_image, images = np.unique(units, return_inverse=True, return_counts=True)
    totals, fold_of = np.bincount(strata).tolist(), np.zeros(len(hashes), dtype=np.int64)
    taken: list[Counter[int]] = [Counter() for _ in range(folds)]
    large: dict[int, Counter[int]] = {unit: Counter() for unit in np.flatnonzero(images > 1).tolist()}
    in_large = images[of_image] > 1
    for unit, stratum in zip(of_image[in_large].tolist(), strata[in_large].tolist(), strict=True):
        large[unit][stratum] += 1
    for unit in sorted(large, key=lambda unit: (-images[unit], unit)):
        number = min(range(folds), key=lambda number: (*_fullness(taken[number], large[unit], totals), number))
        fold_of[unit] = number
        taken[number].update(large[unit])
    single, stratum = of_image[~in_large], strata[~in_large]
    for label in np.unique(stratum).tolist():
        own = np.sort(single[stratum == label])
        fold_of[own] = np.repeat(np.arange(folds), _shares(totals[label], [one[label] for one in taken], len(own)))
    return fold_of[of_image]


def _fullness(taken: Mapping[int, int], counts: Mapping[int, int], totals: Sequence[int]) -> tuple[float, int]:
    """Return how much a unit would raise the sum of a fold's squared class shares, and the fold's number of images."""
    raised = sum(taken[label] * counts[label] / totals[label] ** 2 for label in sorted(counts))
    return raised, sum(taken.values())


def _shares(total: int, taken: Sequence[int], left: int) -> list[int]:
    """Return how many of the remaining images to add to each fold, so that folds become as equal as possible."""
    folds = len(taken)
    wanted = [total * (number + 1) // folds - total * number // folds for number in range(folds)]
    shares = [max(whole - has, 0) for whole, has in zip(wanted, taken, strict=True)]
    while sum(shares) > left:  # groups exceed a fold's share, so the fullest folds receive fewer images
        fullest = max(np.flatnonzero(shares).tolist(), key=lambda fold: (taken[fold] + shares[fold], fold))
        shares[fullest] -= 1
    return shares
