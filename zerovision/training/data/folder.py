"""Folders of images: parts such as `DIR/train` and `DIR/val`, or one folder that is split; one subfolder per class."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from zerovision.training.base.errors import UserError, nearest, ours, shown
from zerovision.training.data import DATASETS, DataOptions
from zerovision.training.data.class_names import label_of, number_classes
from zerovision.training.data.datasets import DatasetPair, first_names, make_file_datasets
from zerovision.training.data.folder_listing import FolderListing, FoundFile
from zerovision.training.data.folder_parts import CLASSES_ANYWAY, Layout, find_layout
from zerovision.training.data.folds import Member, held_out_units, unit_hash
from zerovision.training.data.reading.formats import ARRAY_EXTENSION, IMAGE_EXTENSIONS
from zerovision.training.data.reading.images import read_file
from zerovision.training.data.reading.retry import is_folder
from zerovision.training.data.reading.sources import ImageFile
from zerovision.training.data.settings import NUMBERS

Classes = dict[str, list[FoundFile]]  # the name, see `label_of`, and the images
TOLERANCE = 0.1  # of the expected number of held-out images, and one image


def load(options: DataOptions) -> DatasetPair:
    """Load a folder of classes; hidden files, files without an image's extension, FIFOs and devices are skipped.

    Raises:
        UserError: The folder is missing or empty; a class has no image; there is one class only; the parts have
            different classes, or it is not clear which is which; a symbolic link is broken or leads in a circle.
    """
    listing = open_listing(options)
    layout = find_layout(listing, options.val_part)
    if not layout.train:
        raise UserError(f"'{listing.root}' has parts, but no train/ beside: add one; {CLASSES_ANYWAY}.")
    names = ClassNames()
    if layout.is_divided:
        listing.count_loose(listing.entries(str(listing.root)))
    train = _merged(read_classes(listing, folder, names) for folder in layout.train)
    if layout.val is None:
        train, val = hold_out(listing.root, train, options)
    else:
        val = read_classes(listing, layout.val, names)
        compare_classes(train, val, "validation part")
    if not any(val.values()):
        few = "fewer images per class than --folds" if options.folds else "one image per class"
        raise UserError(f"'{listing.root}' has {few}, so none is left for validation: add images or val/.")
    test = read_classes(listing, layout.test, names, may_lack=True) if layout.test else None
    if test is not None:
        compare_classes(train, train | test, "test part")  # which may lack some
    return _make_datasets(listing, [train, val], test, names, options, layout.notes)


def load_whole(options: DataOptions, part: str = "") -> DatasetPair:
    """Load one folder of classes without splitting it: to evaluate a model on images that it was not trained on.

    Both sets of the pair are the whole folder, or its part "val" or "test"; nothing is cached.

    Raises:
        UserError: As `load`.
    """
    listing, names = open_listing(options), ClassNames()
    top = getattr(find_layout(listing, options.val_part), part) if part else str(listing.root)
    classes = read_classes(listing, top, names)
    return _make_datasets(listing, [classes], None, names, replace(options, cache="off"))


def layout_of(options: DataOptions) -> Layout:
    """Return the parts of a folder.

    Raises:
        UserError: As `load`.
    """
    return find_layout(open_listing(options), options.val_part)


class ClassNames:
    """Names of classes by their folders; those that differ in Unicode form, or in blanks at the ends, are one class."""

    def __init__(self) -> None:
        self._folders: dict[str, dict[str, None]] = {}

    def of(self, folder: str) -> str:
        """Return the name of the class of a folder; raise UserError if the folder's name is no label."""
        try:
            name = str(label_of(folder))
        except ValueError as error:
            raise UserError(f"the class folder {shown(folder)}: {error}: rename it.") from None
        self._folders.setdefault(name, {})[folder] = None
        return name

    def notes(self) -> list[str]:
        """Return a note if one name was met in several forms."""
        several = [name for name, folders in self._folders.items() if len(folders) > 1]
        if not several:
            return []
        ways = "in two Unicode forms, or with blanks at an end"
        return [f"{len(several)} class names are written {ways}, taken as one: {first_names(several)}"]


def _make_datasets(
    listing: FolderListing,
    parts: Sequence[Classes],
    test: Classes | None,
    names: ClassNames,
    options: DataOptions,
    notes: Iterable[str] = (),
) -> DatasetPair:
    class_names, numbers = number_classes(parts[0], (), f"--data {options.data}")

    def files(part: Classes) -> list[ImageFile]:
        return [
            ImageFile(path, size, numbers[name], changed_ns)
            for name in class_names
            for path, size, changed_ns in sorted(part.get(name, []))
        ]

    return make_file_datasets(
        listing.root,
        [files(part) for part in parts],
        class_names,
        options,
        [*notes, *listing.notes(), *names.notes()],
        test=None if test is None else files(test),
    )


def open_listing(options: DataOptions) -> FolderListing:
    """Return the listing of the folder that `options` names; raise UserError if there is none."""
    more = (ARRAY_EXTENSION,) if options.decode == NUMBERS else ()
    return FolderListing(_resolve_root(options.data), more)


def _resolve_root(data: str) -> Path:
    root = Path(os.path.expanduser(data))
    if not data or not is_folder(root):
        usages = [entry.usage for entry in DATASETS.values()]
        problem = "is not a folder" if os.path.isfile(root) else "is not a data set, and no folder of that name exists"
        hint = ours(data, usages, "data set") or nearest(data, usages)
        raise UserError(f"{data!r} {problem}.{hint} Allowed: {', '.join(usages)}.")
    return root.resolve()


def read_classes(listing: FolderListing, top: str, names: ClassNames, *, may_lack: bool = False) -> Classes:
    """List the images of each class folder directly below `top`.

    Raises:
        UserError: There are no classes; one has no image, unless it may lack some.
    """
    entries = listing.entries(top)
    if not entries:
        raise UserError(f"the data folder {top!r} is empty: give it one folder of images per class.")
    listing.count_loose(entries)
    classes: Classes = {}
    folders = [entry for entry in entries if entry.is_dir()]
    for folder in folders:
        classes.setdefault(names.of(folder.name), []).extend(listing.images(folder.path))
    if not any(classes.values()):
        raise UserError(
            f"no image in a class folder below {top!r}: expected {os.path.basename(top)}/CLASS/IMAGE "
            f"with one of {', '.join(IMAGE_EXTENSIONS)}."
        )
    empty = [name for name, files in classes.items() if not files]
    if empty and not may_lack:
        raise UserError(f"no image in class {first_names(empty)} of {top!r}: add images or remove the folder.")
    if len(classes) == 1 and not may_lack:
        inside = len(listing.folders(folders[0].path)) > 1
        cure = f"give --data {folders[0].path}, if its folders are the classes" if inside else "add another one"
        raise UserError(
            f"{top!r} has one class only, {next(iter(classes))!r}, at least two class folders are needed: {cure}."
        )
    return classes


def _merged(parts: Iterable[Classes]) -> Classes:
    merged: Classes = {}
    for part in parts:
        for name, files in part.items():
            merged.setdefault(name, []).extend(files)
    return merged


def compare_classes(train: Classes, other: Classes, what: str) -> None:
    """Raise UserError unless two parts have the same classes."""
    only_train, only_other = sorted(train.keys() - other.keys()), sorted(other.keys() - train.keys())
    if only_train or only_other:
        sides = (("the training part", only_train), (f"the {what}", only_other))
        found = [f"only in {part}: {first_names(names)}" for part, names in sides if names]
        raise UserError(f"the training part and the {what} must have the same classes; {'; '.join(found)}.")


def hold_out(root: Path, classes: Classes, options: DataOptions) -> tuple[Classes, Classes]:
    """Return the training and the validation files, by `split_class` or in folds."""
    if options.folds:
        members = [
            Member(path, name, size, partial(read_file, root / path))
            for name, files in classes.items()
            for path, size, _ in files
        ]
        held_out = held_out_units(members, options.folds, options.fold, options.split_seed)
        split = {
            name: [[file for file in files if (file[0] in held_out) == is_val] for is_val in (False, True)]
            for name, files in classes.items()
        }
    else:
        split = {
            name: [*split_class(files, options.val_fraction, options.split_seed)] for name, files in classes.items()
        }
    train, val = ({name: parts[side] for name, parts in split.items()} for side in (0, 1))
    return train, val


def split_class(
    files: Sequence[FoundFile], val_fraction: float, seed: int = 0
) -> tuple[list[FoundFile], list[FoundFile]]:
    """Return the training and the validation files of one class.

    A file is held out if the hash of its path is below `val_fraction`: that depends on no other file, so adding images
    moves none, and on no seed of a run, so that runs of different seeds are evaluated on the same images. Chance alone
    would hold out 7 of 11 images now and then: if the number is more than `TOLERANCE` and one image off the expected
    one, the files with the next hashes make up for it, and only those can move when images are added. Of two or more
    files, each part has at least one.

    Args:
        files: Of the class.
        val_fraction: Share that is held out, above 0 and below 1.
        seed: Another one holds out other files.
    """
    ranked = sorted((unit_hash(file[0], seed), file) for file in files)
    expected = val_fraction * len(files)
    slack = 1 + TOLERANCE * expected
    held_out = bisect.bisect_left(ranked, (val_fraction,))
    held_out = round(min(max(held_out, expected - slack), expected + slack))
    held_out = min(max(held_out, 1), len(files) - 1)
    return [file for _, file in ranked[held_out:]], [file for _, file in ranked[:held_out]]
