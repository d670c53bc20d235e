"""Cross-validation: which images are held out as a fold. Groups and equal files stay together, folds are even.

As scikit-learn's StratifiedGroupKFold divides: the largest groups first, each into the fold that has least of its
classes. Here it depends on nothing but the names of the images, or their groups, and on what they contain.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from zerovision.training.data.reading.images import ImageError


class Member(NamedTuple):
    """An image that goes into a fold.

    Attributes:
        unit: Its group, or its path: images of one unit are in one fold.
        label: Name of its class.
        size: Of its file in bytes.
        read: Returns the bytes of the file.
    """

    unit: str
    label: str
    size: int
    read: Callable[[], bytes]


def held_out_units(members: Sequence[Member], folds: int, fold: int, seed: int) -> set[str]:
    """Return the units of one fold of so many, from 1.

    Units of one image are in the order of their hashes, of which each fold takes the next ones of a class: each is in
    one fold, and when images are added only those at a fold's ends move to another.
    """
    joined = _join_copies(members)
    images, totals = Counter(joined[member.unit] for member in members), Counter[str]()
    large: dict[str, Counter[str]] = defaultdict(Counter)
    single: dict[str, list[str]] = defaultdict(list)  # by class
    for member in members:
        unit, label = joined[member.unit], member.label
        totals[label] += 1
        if images[unit] > 1:
            large[unit][label] += 1
        else:
            single[label].append(unit)
    taken: list[Counter[str]] = [Counter() for _ in range(folds)]
    fold_of: dict[str, int] = {}
    for unit in sorted(large, key=lambda unit: (-images[unit], unit_hash(unit, seed), unit)):
        fold_of[unit] = min(range(folds), key=lambda number: (*_fullness(taken[number], large[unit], totals), number))
        taken[fold_of[unit]].update(large[unit])
    for label, units in single.items():
        shares = _shares(totals[label], [one[label] for one in taken], len(units))
        numbers = (number for number, count in enumerate(shares) for _ in range(count))
        fold_of |= dict(zip(sorted(units, key=lambda unit: (unit_hash(unit, seed), unit)), numbers, strict=True))
    return {unit for unit, name in joined.items() if fold_of[name] == fold - 1}


def _fullness(taken: Mapping[str, int], counts: Mapping[str, int], totals: Mapping[str, int]) -> tuple[float, int]:
    """Return by how much a unit raises the sum over the classes of a fold's squared shares, and the fold's images."""
    raised = sum(taken[label] * counts[label] / totals[label] ** 2 for label in sorted(counts))
    return raised, sum(taken.values())


def _shares(total: int, taken: Sequence[int], left: int) -> list[int]:
    """Return how many of the images that are left each fold gets, so that they come as near to equal as they can."""
    folds = len(taken)
    wanted = [total * (number + 1) // folds - total * number // folds for number in range(folds)]
    shares = [max(whole - has, 0) for whole, has in zip(wanted, taken, strict=True)]
    while sum(shares) > left:  # a fold has more than its share in groups: those with the most give way
        fullest = max(
            (number for number in range(folds) if shares[number]), key=lambda at: (taken[at] + shares[at], at)
        )
        shares[fullest] -= 1
    return shares


def _join_copies(members: Iterable[Member]) -> dict[str, str]:
    """Return a name for each unit, the same for units with files of equal bytes; only those of equal size are read."""
    parents: dict[str, str] = {}
    by_size: dict[int, list[Member]] = defaultdict(list)
    for member in members:
        parents[member.unit] = member.unit
        by_size[member.size].append(member)

    def name(unit: str) -> str:
        while parents[unit] != unit:
            parents[unit] = unit = parents[parents[unit]]
        return unit

    for alike in by_size.values():
        if len({member.unit for member in alike}) == 1:
            continue
        first: dict[bytes, str] = {}
        for member in alike:
            try:
                digest = hashlib.sha256(member.read()).digest()
            except ImageError:  # which is told where it is read to be trained on
                continue
            one, other = sorted((name(member.unit), name(first.setdefault(digest, member.unit))))
            parents[other] = one
    return {unit: name(unit) for unit in parents}


def unit_hash(name: str, seed: int) -> float:
    """Return a number from 0 to 1 by which a path or a group is held out; another seed gives others."""
    salt = seed.to_bytes(8, "little") if seed else b""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=8, salt=salt).digest()
    return int.from_bytes(digest, "little") / 2**64
