"""The findings of an audit, and the fixes: which images to drop, relabel or move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from zerovision.extras.audit.catalogue import Catalogue
from zerovision.extras.audit.copies import Copy
from zerovision.extras.audit.labels import SUSPECTED, LabelDoubts
from zerovision.planning.data_check import first_of_equal

KINDS = {
    "leak": "The same scene in two parts",
    "conflict": "The same scene under two labels",
    "label": "Suspected wrong labels",
    "repeat": "The same scene twice in one part",
    "outlier": "Images unlike all others",
    "unreadable": "Images that cannot be read",
}
DROP, RELABEL, MOVE, GROUP = "drop", "relabel", "move", "group"
APPLIED = 0.9  # confidence from which two images are the same; below it, they may be two shots of one scene


class Finding(NamedTuple):
    """Something odd about an image."""

    kind: str  # a key of `KINDS`
    image: int  # number of the image
    reason: str  # on one line
    confidence: float  # 0 to 1
    other: int = -1  # number of the image that `image` is a copy of, or -1


class Fix(NamedTuple):
    """What to do with an image."""

    action: str  # `DROP`, `RELABEL`, `MOVE` or `GROUP`
    new: str  # the new label, part or group; empty for `DROP`
    confidence: float  # 0 to 1
    reason: str  # on one line


def equal_files(digests: np.ndarray) -> list[Copy]:
    """Return each file that equals an earlier one byte for byte, paired with the first; see `first_of_equal`."""
    order, firsts = first_of_equal(digests)
    pairs = zip(firsts.tolist(), order.tolist(), strict=True)
    return [Copy(one, other, is_mirrored=False, difference=0.0) for one, other in pairs if one != other]


def copy_findings(catalogue: Catalogue, copies: Sequence[Copy]) -> list[Finding]:
    """Return the findings about pairs of copies: leaks, contradictory labels, and repetitions."""
    findings = []
    for copy in copies:
        # If the parts differ, the image that is not for training comes first.
        pair = sorted((copy.one, copy.other), key=lambda number: (catalogue.parts[number] == "train", -number))
        parts, labels = catalogue.parts[pair], catalogue.labels[pair]
        how = "the same picture" if copy.difference < 1e-6 else "a copy" if copy.confidence >= APPLIED else "the scene"
        how = f"{how}, mirrored" if copy.is_mirrored else how
        if labels[0] != labels[1]:
            names = [catalogue.class_names[label] for label in labels]
            reason = f"{how}, labeled {names[0]!r} here and {names[1]!r} there"
            findings.append(Finding("conflict", pair[0], reason, copy.confidence, pair[1]))
        if parts[0] != parts[1]:
            reason = f"in {parts[0]}, and {how} in {parts[1]}"
            findings.append(Finding("leak", pair[0], reason, copy.confidence, pair[1]))
        elif labels[0] == labels[1]:
            findings.append(Finding("repeat", pair[0], f"{how} twice in {parts[1]}", copy.confidence, pair[1]))
    return findings


def groups_of(copies: Iterable[Copy]) -> list[list[int]]:
    """Return the groups of images that are copies of one another, directly or through other images, each in order."""
    pairs = np.array([copy[:2] for copy in copies], dtype=np.int64).reshape(-1, 2)
    numbers, places = np.unique(pairs, return_inverse=True)
    edges = coo_array((np.ones(len(pairs)), places.reshape(-1, 2).T), shape=(len(numbers), len(numbers)))
    _, group = connected_components(edges, directed=False)
    order = np.argsort(group, kind="stable")
    return [part.tolist() for part in np.split(numbers[order], np.flatnonzero(np.diff(group[order])) + 1) if len(part)]


def _surest(copies: Iterable[Copy]) -> dict[int, float]:
    """Return each image's highest confidence of being a copy."""
    sure: dict[int, float] = {}
    for copy in copies:
        for number in copy[:2]:
            sure[number] = max(sure.get(number, 0.0), copy.confidence)
    return sure


def scene_groups(catalogue: Catalogue, copies: Sequence[Copy], gone: Container[int]) -> list[tuple[int, Fix]]:
    """Return fixes, by image number, that group the images of each scene, so that they are never divided among parts.

    Test images are not grouped, because the test part does not change, nor are dropped images (`gone`). Scenes whose
    images already have different groups are not grouped either.
    """
    sure, offers = _surest(copies), []
    for scene in groups_of(copies):
        kept = [number for number in scene if number not in gone and catalogue.parts[number] != "test"]
        names = {catalogue.groups[number] for number in kept} - {""}
        if len(kept) > 1 and len(names) < 2:
            name = names.pop() if names else f"scene of {catalogue.name(kept[0])}"
            alone = [number for number in kept if not catalogue.groups[number]]
            offers += [(number, Fix(GROUP, name, sure[number], f"{len(kept)} show this scene")) for number in alone]
    return offers


def copy_fixes(catalogue: Catalogue, copies: Sequence[Copy], labels: Mapping[int, Fix]) -> list[tuple[int, Fix]]:
    """Return fixes for copies, by image number, so that each group of copies has one label and is in one part.

    The test part does not change. If a group is in both training and validation, its training images are dropped; if
    they are in the majority, its validation images become training images instead. If the labels, after the fixes in
    `labels`, contradict each other, the majority's label is kept; without a majority, all copies outside the test part
    are dropped. Copies in one part with one label are harmless and stay, as do pairs with a confidence below `APPLIED`.
    """
    copies = [copy for copy in copies if copy.confidence >= APPLIED]
    sure, fixes = _surest(copies), []
    gone = {number for number, fix in labels.items() if fix.action == DROP}
    for whole in groups_of(copies):
        kept = group = [number for number in whole if number not in gone]
        named = {
            number: labels[number].new if number in labels else catalogue.class_names[catalogue.labels[number]]
            for number in group
        }
        label, votes = Counter(named.values()).most_common(1)[0]
        if len(set(named.values())) > 1:
            has_most = 2 * votes > len(group)
            wrong = [
                number
                for number in group
                if catalogue.parts[number] != "test" and not (has_most and named[number] == label)
            ]
            reason = (
                f"{votes} of {len(group)} copies are labeled {label!r}" if has_most else "its copy has another label"
            )
            what = (RELABEL, label) if has_most else (DROP, "")
            fixes += [(number, Fix(*what, sure[number], reason)) for number in wrong]
            kept = kept if has_most else [number for number in group if number not in wrong]
        fixes += _into_one_part(catalogue, kept, sure)
    return fixes


def _into_one_part(catalogue: Catalogue, group: Sequence[int], sure: Mapping[int, float]) -> list[tuple[int, Fix]]:
    """Return fixes for copies that are in several parts; none if all copies are in one part."""
    counts = Counter(catalogue.parts[group].tolist())
    if len(counts) < 2:
        return []
    if counts["train"] > counts["val"] and not counts["test"]:
        moved = [number for number in group if catalogue.parts[number] == "val"]
        return [(number, Fix(MOVE, "train", sure[number], "most of its copies are in train")) for number in moved]
    kept = "test" if counts["test"] else "val"
    dropped = [number for number in group if catalogue.parts[number] != kept]
    return [(number, Fix(DROP, "", sure[number], f"a copy of it is in {kept}")) for number in dropped]


def label_findings(
    catalogue: Catalogue, doubts: LabelDoubts, numbers: np.ndarray
) -> tuple[list[Finding], dict[int, Fix]]:
    """Return the labels of the images `numbers` that are probably wrong, and fixes for those outside the test part."""
    findings, fixes = [], {}
    for place in np.flatnonzero(doubts.probability >= SUSPECTED).tolist():
        number = int(numbers[place])
        label, new = (catalogue.class_names[each] for each in (catalogue.labels[number], doubts.suggested[place]))
        confidence = float(doubts.probability[place])
        reason = f"labeled {label!r}, looks like {new!r}"
        findings.append(Finding("label", number, reason, confidence))
        if catalogue.parts[number] != "test":
            is_known = doubts.certainty[place] >= SUSPECTED
            fixes[number] = Fix(RELABEL if is_known else DROP, new if is_known else "", confidence, reason)
    return findings, fixes
