"""Determines from their names which folders and splits are parts (train, val or test), and which are classes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from zerovision.training.base.errors import UserError, nearest, shown
from zerovision.training.data import DataOptions
from zerovision.training.data.class_names import first_names

if TYPE_CHECKING:
    from zerovision.training.data.folder import FolderListing

PARTS = TRAIN, VAL, TEST = "train", "val", "test"
KINDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation", "validate", "dev", "eval", "evaluation"), VAL),
    **dict.fromkeys(("test", "testing", "holdout", "heldout"), TEST),
}
FILLERS = frozenset({"set", "images", "image", "imgs", "img", "pics", "pictures", "photos", "data", "dataset", "split"})
NO_PARTS = "none"  # a value of --val-part
CLASSES_ANYWAY = f"if the folders are classes, use --val-part {NO_PARTS}"
NAMES_SHOWN = 5


Tops = list[tuple[str, str]]  # name and folder of each part; the folder contains one folder per class


class _Folder(NamedTuple):
    """A folder directly under the data folder."""

    name: str
    kind: str  # `TRAIN`, `VAL` or `TEST` if the name denotes a part, otherwise ''
    path: str  # of the folder, or of its only subfolder if the subfolder's name denotes the same part
    subfolders: frozenset[str]  # names of the folders in `path`


def find_parts(listing: FolderListing, val_part: str = "") -> tuple[Tops, list[str]]:
    """Return the parts of a data folder (or the folder itself as part ''), and notes for the user, or raise UserError.

    `val_part` is the folder to validate on; training then uses the folder named as the training part or, if there is no
    such folder, all other folders except the test part. With '', parts are recognized by name; with "none", all folders
    are classes.
    """
    root = str(listing.root)
    if val_part == NO_PARTS:
        return [("", root)], []
    entries = listing.folders(root)
    kinds = _kinds([entry.name for entry in entries])
    folders = [_describe(listing, entry.name, entry.path, kinds[entry.name]) for entry in entries]
    if val_part:
        return _chosen(root, folders, val_part)
    parts = [folder for folder in folders if folder.kind and folder.subfolders]
    if parts:
        return _named(listing, folders, parts)
    flat = [folder for folder in folders if folder.kind]
    if len({folder.kind for folder in flat}) > 1:
        raise UserError(
            f"{root!r} has the parts {_names(flat)}, but there are no class folders in them: expected "
            f"{flat[0].name}/CLASS/IMAGE; {CLASSES_ANYWAY}."
        )
    _refuse_alike(root, folders)
    notes = [f"{_names(flat)} counts as a class, because no other folder has the name of a part"] if flat else []
    return [("", root)], notes


def part_kind(name: str) -> tuple[str, str]:
    """Return the part that a folder's name denotes (`TRAIN`, `VAL`, `TEST` or ''), and the rest of the name.

    The rest excludes the word for the part and words such as "images", so it is '' for "Training set".
    """
    words = [word for word in re.split(r"[\W_]+", name.casefold()) if word]
    kinds, rest = [], []
    for word in ["".join(words)] if "".join(words) in KINDS else words:  # "hold-out"
        plain = word.rstrip("0123456789")
        plain = plain if plain in KINDS else plain.removesuffix("set")
        if plain in KINDS:
            kinds.append(KINDS[plain])
        elif word not in FILLERS:
            rest.append(word)
    return (kinds[0], " ".join(rest)) if len(kinds) == 1 else ("", " ".join(words))


def parts_of_splits(given: Collection[str], options: DataOptions) -> dict[str, str]:
    """Return `TRAIN`, `VAL` or `TEST` for each of the splits; raise UserError for an unknown split."""
    chosen = options.val_part
    if {*given} == {""} or chosen == NO_PARTS:
        return dict.fromkeys(given, TRAIN)
    found = {name: part_kind(name)[0] for name in given}
    names = sorted(map(shown, given))
    listed = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
    if chosen and chosen not in given:
        raise UserError(
            f"--val-part {chosen}: --data {options.data} has no such split.{nearest(chosen, given)} It has: {listed}."
        )
    if chosen:
        return {name: TEST if kind == TEST else TRAIN for name, kind in found.items()} | {chosen: VAL}
    if unknown := sorted(name for name, kind in found.items() if not kind):
        raise UserError(
            f"--data {options.data}: the split {shown(unknown[0])} is not train, val or test: rename it, or use "
            f"--val-part NAME to validate on one of {listed}, or --val-part {NO_PARTS} to ignore all splits."
        )
    return found


def _kinds(names: Sequence[str]) -> dict[str, str]:
    """Return the kind of each name.

    A name with extra words denotes a part only if the training part and another part have the same extra words.
    """
    found = {name: part_kind(name) for name in names}
    groups: dict[str, set[str]] = defaultdict(set)
    for kind, rest in found.values():
        groups[rest].add(kind)
    return {
        name: kind if not rest or (len(groups[rest] - {""}) > 1 and TRAIN in groups[rest]) else ""
        for name, (kind, rest) in found.items()
    }


def _describe(listing: FolderListing, name: str, path: str, kind: str) -> _Folder:
    """Describe a folder; a folder that contains images is examined only if its name denotes a part."""
    if not kind and listing.starts_with_images(path):
        return _Folder(name, kind, path, frozenset())
    inside = listing.folders(path)
    if len(inside) == 1 and kind and part_kind(inside[0].name)[0] == kind:  # "seg_train/seg_train"
        path = inside[0].path
        inside = listing.folders(path)
    return _Folder(name, kind, path, frozenset(entry.name for entry in inside))


def _chosen(root: str, folders: Sequence[_Folder], val_part: str) -> tuple[Tops, list[str]]:
    by_name = {folder.name: folder for folder in folders}
    val = by_name.get(val_part.strip("/"))
    if val is None:
        raise UserError(
            f"--val-part {val_part}: {root!r} has no such folder.{nearest(val_part, by_name)} Its folders: "
            f"{_names(folders) or 'none'}."
        )
    others = [folder for folder in folders if folder is not val and folder.subfolders]
    test = next((folder for folder in others if folder.kind == TEST), None)
    train = [folder for folder in others if folder.kind == TRAIN] or [one for one in others if one is not test]
    if not train:
        raise UserError(f"--val-part {val_part}: {root!r} has no other folder with classes in it to train on.")
    return _tops(train, val, test), [_summary(train, val, test)]


def _tops(train: Sequence[_Folder], val: _Folder | None, test: _Folder | None) -> Tops:
    others = [(name, part.path) for name, part in ((VAL, val), (TEST, test)) if part]
    return [*((TRAIN, one.path) for one in train), *others]


def _named(listing: FolderListing, folders: Sequence[_Folder], parts: Sequence[_Folder]) -> tuple[Tops, list[str]]:
    """Return the parts of a data folder in which some folders are named like parts."""
    root, by_kind = str(listing.root), defaultdict(list)
    for part in parts:
        by_kind[part.kind].append(part)
    for kind, several in by_kind.items():
        if len(several) > 1:
            cure = "use --val-part NAME" if kind == VAL else "rename all but one"
            raise UserError(f"{root!r} has more than one {kind} part, {_names(several)}: {cure}.")
    others = [one for one in folders if one not in parts]
    with_images = [one for one in others if one.subfolders or listing.starts_with_images(one.path)]
    train, val, test = (next(iter(by_kind[kind]), None) for kind in (TRAIN, VAL, TEST))
    if train is None and with_images:
        raise UserError(
            f"{root!r} has {_names(parts)}, but no train/: put the class folders {_names(with_images)} into "
            f"{root}/train; {CLASSES_ANYWAY}."
        )
    if train is None:
        return _tops([], val, test), []
    flat = next((one for one in with_images if one.kind == VAL), None)
    if flat is not None:
        raise UserError(f"'{flat.path}' has no class folders: expected {flat.name}/CLASS/IMAGE.")
    if with_images and not (val or test or all(one.kind for one in with_images)):
        raise UserError(
            f"{root!r} has {train.name}/ next to other folders, {_names(with_images)}: use --data {train.path} to "
            f"train on that part alone; {CLASSES_ANYWAY}."
        )
    are_plain = not test and val is not None and (train.name, val.name) == (TRAIN, VAL)
    notes = [] if are_plain else [_summary([train], val, test)]
    if with_images:
        notes.append(f"not used: {_names(with_images)}, which have no class folders or are not named as parts")
    return _tops([train], val, test), notes


def _summary(train: Sequence[_Folder], val: _Folder | None, test: _Folder | None) -> str:
    names = ", ".join(f"{one.name}/" for one in train[:NAMES_SHOWN])
    validated = f"{val.name}/ is the validation part" if val else "--val-fraction of each class is held out"
    judged = f"; {test.name}/ is evaluated once, after training" if test else ""
    return f"training on {names}; {validated}{judged}"


def _refuse_alike(root: str, folders: Sequence[_Folder]) -> None:
    """Reject folders whose subfolders have the same names, because such folders are probably parts, not classes."""
    counts = Counter(name for folder in folders for name in folder.subfolders)
    alike = [
        folder
        for folder in folders
        if (shared := sum(counts[name] > 1 for name in folder.subfolders)) > 1 and 2 * shared >= len(folder.subfolders)
    ]
    if len(alike) > 1:
        raise UserError(
            f"{root!r}: the folders {_names(alike)} contain folders with the same names, so they look like parts, not "
            f"classes: use --val-part {alike[-1].name} to validate on that folder; {CLASSES_ANYWAY}."
        )


def _names(folders: Sequence[_Folder]) -> str:
    return first_names([one.name for one in folders])
