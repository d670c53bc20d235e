"""Images that a list names one by one, a table or the index of archives: their classes, and the parts they are in."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from zerovision.training.base.errors import UserError, nearest, shown
from zerovision.training.data import DataOptions
from zerovision.training.data.datasets import DatasetPair, make_file_datasets
from zerovision.training.data.folder import split_class
from zerovision.training.data.folder_parts import NO_PARTS, TEST, TRAIN, VAL, Layout, part_kind
from zerovision.training.data.folds import Member, held_out_units
from zerovision.training.data.label_sets import make_label_sets, rarest_class
from zerovision.training.data.reading.images import read_file
from zerovision.training.data.reading.remote_files import RemoteArchive
from zerovision.training.data.reading.sources import Archive, ImageFile
from zerovision.training.data.settings import MULTILABEL

NAMED = 5


class Record(NamedTuple):
    """An image of a list; all but its label and part as in `ImageFile`.

    Attributes:
        path: Relative to the root of the data, or the name in an archive.
        label: Name of the class.
        part: As it is given, '' if it is not.
        group: Images of one group are never divided among parts; '' for an image of its own.
    """

    path: str
    label: str
    part: str = ""
    group: str = ""
    size: int = 0
    changed_ns: int = 0
    weight: float = 1.0
    archive: int = 0
    place: int = 0


class Listing(NamedTuple):
    """All that a list says.

    Attributes:
        root: Folder that the paths are relative to.
        records: The images.
        class_names: In the order of their numbers; empty for those of the records, sorted.
        archive: What the images are in; None for files.
        notes: Lines for the user.
    """

    root: PurePath
    records: list[Record]
    class_names: Sequence[str] = ()
    archive: Archive | None = None
    notes: Sequence[str] = ()


def load(listing: Listing, options: DataOptions) -> DatasetPair:
    """Return the training, validation and test set of a list; the order of its lines decides nothing.

    As of a folder, the images of a part are in the order of their classes, then of their paths, and without a
    validation part a share of each class is held out by the hash of the paths. So the same images give the same
    training, whatever lists them.

    Raises:
        UserError: A part is unknown, empty, or divides a group; see also `make_dataset_pair`.
    """
    parts = _parts(listing.records, options)
    if not parts[TRAIN]:
        raise UserError(f"--data {options.data} has no training image: give some the split train.")
    groups: dict[str, str] = {}
    for name, records in parts.items():
        for record in records:
            if record.group and groups.setdefault(record.group, name) != name:
                both = f"{groups[record.group]} and in {name}"
                raise UserError(
                    f"--data {options.data}: the group {shown(record.group)} is in {both}: put all of it into one, "
                    "or leave out the column split."
                )
    if not parts[VAL]:
        parts[TRAIN], parts[VAL] = _held_out(listing, parts[TRAIN], options)
    if not parts[VAL]:
        few = "fewer images or groups than --folds" if options.folds else "one image or group"
        raise UserError(f"--data {options.data}: each class has {few}, so none is left for validation: add images.")
    return _datasets(listing, [parts[TRAIN], parts[VAL]], parts[TEST], options)


def load_whole(listing: Listing, options: DataOptions, part: str = "") -> DatasetPair:
    """Return all images of a list, or of a part, as both sets of a pair, uncached, as `folder.load_whole`."""
    chosen = _parts(listing.records, options)[part] if part else [*listing.records]
    return _datasets(listing, [chosen], [], replace(options, cache="off"))


def layout_of(listing: Listing, options: DataOptions) -> Layout:
    """Return which parts a list has; raise UserError as `load`."""
    parts, root = _parts(listing.records, options), str(listing.root)
    val, test = (root if parts[name] else None for name in (VAL, TEST))
    return Layout([root] if parts[TRAIN] else [], val, test, is_divided=bool(val or test))


def _parts(records: Sequence[Record], options: DataOptions) -> dict[str, list[Record]]:
    parts: dict[str, list[Record]] = {TRAIN: [], VAL: [], TEST: []}
    kinds = _kinds({record.part for record in records}, options)
    for record in records:
        parts[kinds[record.part]].append(record)
    return parts


def _kinds(given: set[str], options: DataOptions) -> Mapping[str, str]:
    """Return `TRAIN`, `VAL` or `TEST` for each name of a part."""
    chosen = options.val_part
    if given == {""} or chosen == NO_PARTS:
        return dict.fromkeys(given, TRAIN)
    found = {name: part_kind(name)[0] for name in given}
    names = sorted(map(shown, given))
    listed = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
    if chosen and chosen not in given:
        raise UserError(
            f"--val-part {chosen}: --data {options.data} has no such split.{nearest(chosen, given)} It has {listed}."
        )
    if chosen:
        others = {name: TEST if kind == TEST else TRAIN for name, kind in found.items()}
        return others | {chosen: VAL}
    if unknown := sorted(name for name, kind in found.items() if not kind):
        raise UserError(
            f"--data {options.data}: the split {shown(unknown[0])} is none of train, val and test: rename it, or give "
            f"--val-part NAME to validate on one of {listed}, or --val-part {NO_PARTS} to pass over all of them."
        )
    return found


def _held_out(listing: Listing, records: Sequence[Record], options: DataOptions) -> tuple[list[Record], list[Record]]:
    """Return what is trained and what is validated on: a share of each class's units, or a fold, see `folds`.

    A group of several classes counts for that of most of its images.
    """
    strata = rarest_class(record.label for record in records) if options.task == MULTILABEL else {}
    names = _units(records)
    if options.folds:
        members = [
            Member(name, strata.get(record.label, record.label), record.size, partial(_read, listing, record))
            for name, record in zip(names, records, strict=True)
        ]
        fold = held_out_units(members, options.folds, options.fold, options.split_seed)
        train, val = (
            [record for name, record in zip(names, records, strict=True) if (name in fold) == is_val]
            for is_val in (False, True)
        )
        return train, val
    units: dict[str, list[Record]] = defaultdict(list)
    for name, record in zip(names, records, strict=True):
        units[name].append(record)
    by_class: dict[str, list[str]] = defaultdict(list)
    for name, of_unit in units.items():
        counts = Counter(strata.get(record.label, record.label) for record in of_unit)
        by_class[min(counts, key=lambda label: (-counts[label], label))].append(name)
    sides: tuple[list[Record], list[Record]] = ([], [])
    for of_class in by_class.values():
        split = split_class([(name, 0, 0) for name in of_class], options.val_fraction, options.split_seed)
        for side, chosen in zip(sides, split, strict=True):
            side += [record for name, *_ in chosen for record in units[name]]
    return sides


def _units(records: Sequence[Record]) -> list[str]:
    """Return for each image the name of the images that it is never divided from: its group, or those of its path.

    Images of archives that are called alike are not one.
    """
    names = [record.group or record.path for record in records]
    hashes = np.fromiter(map(hash, names), np.int64, len(names))  # a set of millions of names would take a gigabyte
    if len(np.unique(hashes)) == len(names):
        return names
    places: dict[str, tuple[int, int]] = {}
    apart = {
        name
        for name, record in zip(names, records, strict=True)
        if not record.group
        and places.setdefault(name, (record.archive, record.place)) != (record.archive, record.place)
    }
    return [
        f"{name}\0{record.archive}\0{record.place}" if name in apart and not record.group else name
        for name, record in zip(names, records, strict=True)
    ]


def _read(listing: Listing, record: Record) -> bytes:
    if listing.archive is None:
        return read_file(listing.root / record.path)
    return listing.archive.read(record.archive, record.place, record.size)


def _datasets(listing: Listing, parts: Sequence[list[Record]], test: list[Record], options: DataOptions) -> DatasetPair:
    """Return the sets of records, which are taken out of their lists, and out of the listing's."""
    is_multilabel = options.task == MULTILABEL and listing.archive is None
    of_records = sorted({record.label for record in listing.records})
    names = of_records if is_multilabel else listing.class_names or of_records
    numbers = {name: number for number, name in enumerate(names)}
    mean = sum(record.weight for record in parts[0]) / len(parts[0])
    listing.records.clear()
    if not mean:
        raise UserError(f"--data {options.data}: all training images have weight 0.")

    def files(records: list[Record]) -> list[ImageFile]:
        found = []
        while records:  # of millions of images there is room for one list of them
            record = records.pop()
            found.append(
                ImageFile(
                    record.path,
                    record.size,
                    numbers[record.label],
                    record.changed_ns,
                    record.weight if mean == 1 else record.weight / mean,  # 1 on average, as the weights of classes
                    record.archive,
                    record.place,
                )
            )
        found.sort()
        return sorted(found, key=lambda file: file.label)

    label_sets, class_names = None, [*names]
    if is_multilabel:
        label_sets, class_names = make_label_sets(names, listing.class_names)
    if isinstance(listing.archive, RemoteArchive):
        for name, part in (("validation", parts[-1]), ("test", test)):
            listing.archive.check_room(name, (record.archive for record in part))
    return make_file_datasets(
        listing.root,
        [files(part) for part in parts],
        class_names,
        options,
        listing.notes,
        test=files(test) or None,
        archive=listing.archive,
        label_sets=label_sets,
    )
