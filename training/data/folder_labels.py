"""A folder for `--task multilabel`: an image that is linked into several class folders has all of their labels."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial

from training.base.errors import UserError, shown
from training.data import DataOptions
from training.data.folder import Classes, ClassNames, compare_classes, open_listing, read_classes
from training.data.folder_parts import TEST, TRAIN, VAL, find_layout
from training.data.label_sets import SEPARATOR, SEPARATORS
from training.data.reading.retry import patiently
from training.data.records import Listing, Record


def listing(options: DataOptions) -> Listing:
    """Return the images of a folder, each once however many links lead to it, and the labels of each.

    Images are one if they are one file, by symbolic or hard links. Its path is that of the file itself, if that is in
    the folder, so that another label does not move it to another part; or else the first of the links, as of hard
    ones. Images beside the class folders have no label, unless they are linked into one.

    Raises:
        UserError: As of `folder.load`; an image is in two parts; a class has ; or | in its name.
    """
    folders, names = open_listing(options), ClassNames()
    layout = find_layout(folders, options.val_part)
    found: dict[tuple[int, int], Record] = {}
    labels: dict[tuple[int, int], set[str]] = {}
    trained: Classes = {}
    tops = [*((TRAIN, top) for top in layout.train), (VAL, layout.val), (TEST, layout.test)]
    for part, top in [(part, top) for part, top in tops if top]:
        classes = read_classes(folders, top, names, may_lack=part != TRAIN)
        trained |= classes if part == TRAIN else {}
        compare_classes(trained, trained | classes, f"part {os.path.basename(top)}")
        for label, files in [*classes.items(), ("", folders.take_loose())]:
            if SEPARATORS.search(label):
                raise UserError(
                    f"--task multilabel: the class folder {shown(label)} has ; or | in its name: rename it."
                )
            for path, size, changed_ns in files:
                full = os.path.join(folders.root, path)
                status, real = patiently(partial(os.stat, full), full), os.path.realpath(full)
                file = status.st_dev, status.st_ino
                inside = os.path.relpath(real, folders.root) if real.startswith(f"{folders.root}/") else path
                known = found.setdefault(file, Record(inside, "", part, size=size, changed_ns=changed_ns))
                if known.part != part:
                    both = f"{shown(path)} of the part {part} is the same file as {shown(known.path)} of {known.part}"
                    raise UserError(f"--data {options.data}: {both}: an image is in one part, remove one of the links.")
                found[file] = known._replace(path=min(known.path, inside))
                labels.setdefault(file, set()).update([label] if label else [])
    if layout.is_divided:
        folders.count_loose(folders.entries(str(folders.root)))
    records = [one._replace(label=SEPARATOR.join(sorted(labels[file]))) for file, one in found.items()]
    counts = Counter(min(len(own), 2) for own in labels.values())
    note = f"{counts[2]} images are linked into several class folders, {counts[0]} into none"
    return Listing(folders.root, records, notes=[*layout.notes, note, *folders.notes(), *names.notes()])
