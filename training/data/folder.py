"""Folders of images: `DIR/train` and `DIR/val`, or one folder that is split; one subfolder per class."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from models.names_elsewhere import ours
from training.data import DATASETS, DataOptions
from training.data.datasets import NAMES_IN_MESSAGE, DatasetPair, first_names, make_file_datasets
from training.data.reading.formats import CURES, IMAGE_EXTENSIONS
from training.data.reading.retry import entries_of, patiently
from training.data.reading.sources import ImageFile
from training.errors import UserError, nearest

PARTS = ("train", "val")

FoundFile = tuple[str, int, int]  # path relative to the root, with "/", size in bytes, time of the last change in ns
Classes = dict[str, list[FoundFile]]


def load(options: DataOptions) -> DatasetPair:
    """Load a folder of classes; hidden files, files without an image's extension, FIFOs and devices are skipped.

    Raises:
        UserError: The folder is missing or empty; a class has no image; there is one class only; train/ and val/ have
            different classes; a symbolic link is broken or leads out of the folder.
    """
    root = _resolve_root(options.data)
    ignored: Counter[str] = Counter()
    if has_parts(options.data):
        for name in PARTS:
            _require_part(root / name, root)
        train, val = (_scan_classes(root / name, root, ignored) for name in PARTS)
        _compare_classes(train, val)
    else:
        train, val = _split_classes(_scan_classes(root, root, ignored), options.val_fraction)
    if not any(val.values()):
        raise UserError(f"{str(root)!r} has one image per class, so none is left for validation: add images or val/.")
    return _make_datasets(root, [train, val], options, ignored)


def load_whole(options: DataOptions) -> DatasetPair:
    """Load one folder of classes without splitting it: to evaluate a model on images that it was not trained on.

    Both sets of the pair are the whole folder; nothing is cached.

    Raises:
        UserError: As `load`.
    """
    root = _resolve_root(options.data)
    ignored: Counter[str] = Counter()
    return _make_datasets(root, [_scan_classes(root, root, ignored)], replace(options, cache="off"), ignored)


def _make_datasets(root: Path, parts: list[Classes], options: DataOptions, ignored: Counter[str]) -> DatasetPair:
    class_names, notes = sorted(parts[0]), []
    files = [
        [
            ImageFile(path, size, label, changed_ns)
            for label, name in enumerate(class_names)
            for path, size, changed_ns in sorted(part[name])
        ]
        for part in parts
    ]
    if ignored:
        kinds = ", ".join(f"{count} {extension}" for extension, count in ignored.most_common(NAMES_IN_MESSAGE))
        notes.append(f"skipped {ignored.total()} files that are not images by type or extension: {kinds}")
        notes += [f"{ignored[name]} {name} could be read: {cure}" for name, cure in CURES.items() if name in ignored]
    return make_file_datasets(root, files, class_names, options, notes)


def has_parts(data: str) -> bool:
    """Whether a folder is already split into train/ and val/."""
    root = Path(os.path.expanduser(data))
    return any(os.path.isdir(root / name) for name in PARTS)


def _split_classes(classes: Classes, val_fraction: float) -> tuple[Classes, Classes]:
    """Split every class into a training and a validation part.

    A file is held out if the hash of its path is below `val_fraction`: that depends on no other file, so adding images
    moves none, and on no seed, so that runs of different seeds are evaluated on the same images. Only if a class of two
    or more would be left without one of the parts, the file with the lowest or highest hash fills it.
    """
    train: Classes = {}
    val: Classes = {}
    for name, files in classes.items():
        ranked = sorted((_unit_hash(file[0]), file) for file in files)
        held_out = sum(position < val_fraction for position, _ in ranked)
        held_out = min(max(held_out, 1), len(files) - 1)
        val[name] = [file for _, file in ranked[:held_out]]
        train[name] = [file for _, file in ranked[held_out:]]
    return train, val


def _unit_hash(path: str) -> float:
    digest = hashlib.blake2b(os.fsencode(path), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _resolve_root(data: str) -> Path:
    root = Path(os.path.expanduser(data))
    if not data or not os.path.isdir(root):
        usages = [entry.usage for entry in DATASETS.values()]
        problem = "is not a folder" if os.path.isfile(root) else "is not a data set, and no folder of that name exists"
        hint = ours(data, usages, "data set") or nearest(data, usages)
        raise UserError(f"{data!r} {problem}.{hint} Allowed: {', '.join(usages)}.")
    return root.resolve()


def _require_part(part: Path, root: Path) -> None:
    if part.is_symlink():
        _check_link(str(part), str(root))
    if not part.is_dir():
        raise UserError(
            f"{str(root)!r} has no folder {part.name}/: give it one, or give one folder of classes, "
            "which is split by --val-fraction."
        )


def _scan_classes(top: Path, root: Path, ignored: Counter[str]) -> Classes:
    """List the images of each class folder directly below `top`, sorted by path; count other files by extension."""
    entries = _visible_entries(str(top), str(root))
    if not entries:
        raise UserError(f"the data folder {str(top)!r} is empty: give it one folder of images per class.")
    classes: Classes = {}
    prefix = len(str(root).rstrip("/")) + 1
    for folder in (entry for entry in entries if entry.is_dir()):
        files = []
        for entry in _files_below(folder.path, str(root)):
            extension = os.path.splitext(entry.name)[1].lower()
            if not entry.is_file():
                ignored["not a regular file"] += 1
            elif extension in IMAGE_EXTENSIONS:
                status = patiently(entry.stat, entry.path)
                files.append((entry.path[prefix:], status.st_size, status.st_mtime_ns))
            else:
                ignored[extension or "no extension"] += 1
        classes[folder.name] = sorted(files)
    if not any(classes.values()):
        raise UserError(
            f"no image in a class folder below {str(top)!r}: expected {top.name}/CLASS/IMAGE "
            f"with one of {', '.join(IMAGE_EXTENSIONS)}."
        )
    empty = [name for name, files in classes.items() if not files]
    if empty:
        raise UserError(f"no image in class {first_names(empty)} of {str(top)!r}: add images or remove the folder.")
    if len(classes) == 1:
        raise UserError(
            f"{str(top)!r} has one class only, {next(iter(classes))!r}: at least two class folders are needed."
        )
    return classes


def _visible_entries(folder: str, root: str) -> list[os.DirEntry[str]]:
    try:
        entries = [entry for entry in entries_of(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"the folder {folder!r} cannot be listed: {error.strerror}.") from None
    for entry in entries:
        if entry.is_symlink():
            _check_link(entry.path, root)
    return entries


def _files_below(folder: str, root: str) -> Iterator[os.DirEntry[str]]:
    for entry in _visible_entries(folder, root):
        if entry.is_dir():
            yield from _files_below(entry.path, root)
        else:
            yield entry


def _check_link(path: str, root: str) -> None:
    """Raise UserError if a link is broken, leads out of `root`, or leads to a folder that contains the link."""
    target = os.path.realpath(path)
    if not os.path.exists(target):
        raise UserError(f"the symbolic link {path!r} is broken: remove or repair it.")
    if not Path(target).is_relative_to(root):
        raise UserError(
            f"the symbolic link {path!r} leads out of the data folder {root!r}: copy the file there instead."
        )
    if Path(os.path.realpath(os.path.dirname(path))).is_relative_to(target):
        raise UserError(f"the symbolic link {path!r} leads to a folder that contains it: remove it.")


def _compare_classes(train: Classes, val: Classes) -> None:
    only_train, only_val = sorted(train.keys() - val.keys()), sorted(val.keys() - train.keys())
    if only_train or only_val:
        sides = (("train/", only_train), ("val/", only_val))
        found = [f"only in {part}: {first_names(names)}" for part, names in sides if names]
        raise UserError(f"train/ and val/ must have the same classes; {'; '.join(found)}.")
