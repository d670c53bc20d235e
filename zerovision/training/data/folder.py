"""Folders of images, one subfolder per class: parts such as `DIR/train` and `DIR/val`, or one folder to split."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from zerovision.training.base.errors import UserError, either, nearest, ours, shown
from zerovision.training.base.units import plural
from zerovision.training.data import DATASETS, DataOptions
from zerovision.training.data.class_names import first_names, label_of
from zerovision.training.data.division import with_classes
from zerovision.training.data.images import Facts, Images, ImagesBuilder
from zerovision.training.data.parts import PARTS, TEST, TRAIN, VAL, find_parts
from zerovision.training.data.reading.files import ARRAY_EXTENSION, CURES, IMAGE_EXTENSIONS
from zerovision.training.data.reading.retry import FolderEntry, entries_of, is_folder, patiently
from zerovision.training.data.settings import NUMBERS

NAMES_IN_NOTE = 5
# Names of files and folders that operating systems and file servers create, in lower case, without hidden names.
SYSTEM_NAMES = frozenset(
    {
        *("@eadir", "@recycle", "@recently-snapshot", "@sharebin", "@tmp", "#recycle", "#snapshot"),
        *("$recycle.bin", "recycler", "recycled", "system volume information", "found.000", "lost+found"),
        *("__macosx", "__pycache__", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"),
    }
)


class FolderListing:
    """Lists the folders under `root`, which is a resolved path, and counts followed links and skipped files."""

    def __init__(self, root: Path, more: tuple[str, ...] = ()) -> None:
        self.root, self._extensions = root, (*IMAGE_EXTENSIONS, *more)
        self._links: set[str] = set()
        self._system: dict[str, str] = {}  # path and name
        self._other_files: Counter[str] = Counter()
        self._loose: set[str] = set()

    def entries(self, folder: str) -> list[FolderEntry]:
        """Return a folder's entries, sorted by name, without hidden and system files, or raise a UserError."""
        try:
            entries = entries_of(folder)
        except OSError as error:
            raise UserError(f"the folder {folder!r} cannot be listed: {error.strerror}.") from None
        kept = []
        for entry in entries:
            if entry.name.startswith(".") or entry.name.casefold() in SYSTEM_NAMES:
                self._system[entry.path] = entry.name
            else:
                kept.append(entry)
        broken = [entry.path for entry in kept if entry.is_symlink() and not self._exists(entry.path)]
        if broken:
            more = f" (and {len(broken) - 1} more in its folder)" if len(broken) > 1 else ""
            raise UserError(f"the symbolic link {broken[0]!r}{more} is broken: remove or repair it.")
        return kept

    def folders(self, folder: str) -> list[FolderEntry]:
        """Return the subfolders of a folder."""
        return [entry for entry in self.entries(folder) if entry.is_dir()]

    def count_loose(self, entries: Iterable[FolderEntry]) -> None:
        """Count the images directly in a folder of classes, which belong to no class."""
        self._loose |= {entry.path for entry in entries if self._is_image(entry.name) and entry.is_file()}

    def starts_with_images(self, folder: str) -> bool:
        """Return whether a folder directly contains images, not just in its subfolders."""

        def starts() -> bool:
            with os.scandir(folder) as scan:  # stop early: a class may have a million images
                return any(self._is_image(entry.name) and not entry.is_dir() for entry in scan)

        return patiently(starts, folder)

    def images(self, folder: str) -> Iterator[FolderEntry]:
        """Yield the images in a folder and all its subfolders; other files are counted."""
        for entry in self._files_below(folder, [os.path.realpath(folder)]):
            if not entry.is_file():
                self._other_files["not a regular file"] += 1
            elif self._is_image(entry.name):
                yield entry
            else:
                self._other_files[os.path.splitext(entry.name)[1].lower() or "no extension"] += 1

    def notes(self) -> Iterator[str]:
        """Yield one line each about skipped files and followed links."""
        if self._other_files:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self._other_files.most_common(NAMES_IN_NOTE))
            yield f"skipped {plural(self._other_files.total(), 'file')} with an unsupported type or extension: {kinds}"
            for kind, cure in CURES.items():
                if kind in self._other_files:
                    yield f"{plural(self._other_files[kind], f'{kind} file')} could be read: {cure}"
        if self._system:
            names = ", ".join(sorted(set(self._system.values()))[:NAMES_IN_NOTE])
            yield f"skipped {len(self._system)} hidden files and folders of the system: {names}"
        if self._loose:
            first = os.path.relpath(min(self._loose), self.root)
            yield f"{len(self._loose)} images next to the class folders belong to no class and are not used: {first}"
        if self._links:
            first = os.path.relpath(min(self._links), self.root)
            yield f"followed {len(self._links)} symbolic links, such as {first}; the folder of a link is its class"

    def _files_below(self, folder: str, chain: Sequence[str]) -> Iterator[FolderEntry]:
        """Yield the files under a folder; `chain` contains the real paths of the folder and its parents."""
        for entry in self.entries(folder):
            if not entry.is_dir():
                yield entry
                continue
            real = os.path.realpath(entry.path)
            if entry.is_symlink() and any(Path(one).is_relative_to(real) for one in chain):
                raise UserError(f"the symbolic link {entry.path!r} leads to a folder that contains it: remove it.")
            yield from self._files_below(entry.path, [*chain, real])

    def _exists(self, link: str) -> bool:
        """Return whether a link's target exists; if it does, count the link."""
        try:
            patiently(partial(os.stat, link), link)
        except OSError:
            return False
        self._links.add(link)
        return True

    def _is_image(self, name: str) -> bool:
        return os.path.splitext(name)[1].lower() in self._extensions


def listing(options: DataOptions) -> Images:
    """Return the images of a folder of classes, or raise a UserError.

    Hidden files, FIFOs, devices and files of other types are skipped.
    """
    root = Path(os.path.expanduser(options.data))
    if not options.data or not is_folder(root):
        usages = [entry.usage for entry in DATASETS.values()]
        problem = "is not a folder" if os.path.isfile(root) else "is not a data set, and no folder of that name exists"
        hint = ours(options.data, usages, "data set") or nearest(options.data, usages)
        raise UserError(f"{options.data!r} {problem}.{hint} Allowed: {', '.join(usages)}.")
    folder = FolderListing(root.resolve(), (ARRAY_EXTENSION,) if options.decode == NUMBERS else ())
    tops, notes = find_parts(folder, options.val_part)
    if tops[0][0]:
        folder.count_loose(folder.entries(str(folder.root)))
    builder, folders_of = ImagesBuilder(), defaultdict[str, set[str]](set)
    classes: dict[str, set[str]] = defaultdict(set)
    for part, top in tops:
        classes[part] |= _add_classes(builder, folder, top, part, folders_of, options.fewest_classes)
    if classes[TRAIN] and classes[VAL]:
        _compare(classes[TRAIN], classes[VAL], "validation part")
    if classes[TRAIN] and classes[TEST]:
        _compare(classes[TRAIN], classes[TRAIN] | classes[TEST], "test part")  # some classes may have no test images
    notes += folder.notes()
    if several := [name for name, folders in folders_of.items() if len(folders) > 1]:
        ways = "in two Unicode forms, or with leading or trailing blanks"
        notes.append(f"{len(several)} class names are written {ways}, and each is one class: {first_names(several)}")
    found = replace(builder.build(folder.root), notes=notes)
    found = found.renamed("part", {"": TRAIN} | {part: part for part in PARTS}, PARTS)
    return with_classes(found, (), f"--data {options.data}")


def _add_classes(
    builder: ImagesBuilder, folder: FolderListing, top: str, part: str, folders_of: dict[str, set[str]], fewest: int
) -> set[str]:
    """Add the images of the class folders directly under `top`, and return the classes; require at least `fewest`.

    Folders whose names differ only in Unicode normalization or in blanks at the ends are one class; `folders_of`
    collects their names.
    """
    entries = folder.entries(top)
    if not entries:
        raise UserError(f"the data folder {top!r} is empty: add one folder of images per class.")
    folder.count_loose(entries)
    counts: Counter[str] = Counter()
    folders, facts = [entry for entry in entries if entry.is_dir()], Facts(part)
    start = len(f"{folder.root}".rstrip("/")) + 1
    for entry in folders:
        name = _class_of(entry.name)
        folders_of[name].add(entry.name)
        counts[name] += 0
        for image in folder.images(entry.path):
            status = image.stat()
            builder.add(image.path[start:], name, facts, state=(status.st_size, status.st_mtime_ns))
            counts[name] += 1
    if not any(counts.values()):
        raise UserError(
            f"there are no images in class folders under {top!r}: expected {os.path.basename(top)}/CLASS/IMAGE, where "
            f"IMAGE ends in {either(IMAGE_EXTENSIONS)}."
        )
    empty = [name for name, count in counts.items() if not count]
    if empty and part != TEST:
        raise UserError(f"there is no image in class {first_names(empty)} of {top!r}: add images or remove the folder.")
    if len(counts) < fewest and part != TEST:
        inside = len(folder.folders(folders[0].path)) > 1
        cure = f"use --data {folders[0].path}, if its folders are the classes" if inside else "add another class"
        raise UserError(f"{top!r} has only one class, {next(iter(counts))!r}, but at least two are needed: {cure}.")
    return {*counts}


def _class_of(folder: str) -> str:
    try:
        return str(label_of(folder))
    except ValueError as error:
        raise UserError(f"the class folder {shown(folder)}: {error}: rename it.") from None


def _compare(train: Collection[str], other: Collection[str], what: str) -> None:
    """Raise UserError unless two parts have the same classes."""
    sides = (("the training part", {*train} - {*other}), (f"the {what}", {*other} - {*train}))
    found = [f"only in {part}: {first_names(sorted(names))}" for part, names in sides if names]
    if found:
        raise UserError(f"the training part and the {what} must have the same classes; {'; '.join(found)}.")
