"""Writes the files of an audit: a page, all findings, the fixes, and the fixed data as a table for --data."""

from __future__ import annotations

import csv
import os
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from zerovision.delivery import pages
from zerovision.delivery.evaluation_files import thumbnail
from zerovision.extras.audit.catalogue import Catalogue
from zerovision.extras.audit.findings import DROP, GROUP, KINDS, MOVE, RELABEL, Finding, Fix
from zerovision.training.base.errors import UserError, printable, shown
from zerovision.training.base.files import as_given, errors_of_writing, replacing_folder, write_csv, write_json
from zerovision.training.data.reading.files import ImageError
from zerovision.training.observe.evaluation import check_replaceable

TEMPLATE = Path(__file__).parents[1] / "audit.html"
FACTS, PAGE, FIXES, FIXED = "audit.json", "audit.html", "fixes.csv", "fixed.csv"
COLUMNS = ("path", "action", "new", "confidence", "reason")
SHOWN_OF_A_KIND = 60
THUMBNAIL_PIXELS, JPEG_QUALITY = 96, 80

Fixes = Sequence[tuple[int, Fix]]


def check_output(folder: Path) -> None:
    """Raise UserError for a folder that contains anything but an audit."""
    check_replaceable(folder, FACTS, "audit", "use another --output folder")


def write_audit(
    folder: Path, facts: dict[str, Any], findings: Sequence[Finding], fixes: Fixes, catalogue: Catalogue
) -> None:
    """Write all files of an audit, replacing those of an earlier one; if this fails, the folder is not changed.

    `facts` has `data`, `run`, `small_classes` and `notes`; `findings` has the most certain ones of each kind first. A
    UserError is raised if the folder contains anything but an audit, or cannot be written to.
    """
    check_output(folder)
    listed = [
        {"kind": one.kind, "image": catalogue.name(one.image), "part": str(catalogue.parts[one.image])}
        | {"label": catalogue.class_names[catalogue.labels[one.image]], "confidence": round(one.confidence, 4)}
        | {"reason": one.reason, "copy_of": catalogue.name(one.other) if one.other >= 0 else None}
        for one in findings
    ]
    rows = ((catalogue.name(one), fix.action, fix.new, f"{fix.confidence:.3f}", fix.reason) for one, fix in fixes)
    with errors_of_writing(folder), replacing_folder(folder) as new:
        write_json(new / FACTS, facts | {"images": len(catalogue), "findings": listed})
        write_csv(new / FIXES, COLUMNS, rows)
        if catalogue.are_files:
            write_fixed(new / FIXED, catalogue, [one for one in fixes if one[1].action != GROUP])
        (new / PAGE).write_text(_page(facts, findings, fixes, catalogue), encoding="utf-8", errors="replace")


def write_fixed(path: Path, catalogue: Catalogue, fixes: Fixes) -> int:
    """Write the table of all images with the fixes applied, and return the number of images in it."""
    labels = [catalogue.class_names[label] for label in catalogue.labels]
    parts, groups = catalogue.parts.tolist(), [*catalogue.groups]
    dropped = {number for number, fix in fixes if fix.action == DROP}
    columns = {RELABEL: labels, MOVE: parts, GROUP: groups}
    for number, fix in fixes:
        if number not in dropped:
            columns[fix.action][number] = fix.new
    kept = [number for number in range(len(catalogue)) if number not in dropped]
    _into_one_part(kept, groups, parts, {number for number, fix in fixes if fix.action == MOVE})
    others = ({"group": groups} if any(groups) else {}) | catalogue.other_columns()
    rows = ((catalogue.name(one), labels[one], parts[one], *(cells[one] for cells in others.values())) for one in kept)
    write_csv(path, ("path", "label", "split", *others), rows)
    return len(kept)


def _into_one_part(numbers: Sequence[int], groups: list[str], parts: list[str], moved: Collection[int]) -> None:
    """Put each group into one part, as `--data` requires: a moved image's part, or the part of most of its images."""
    members: dict[str, list[int]] = defaultdict(list)
    for number in numbers:
        members[groups[number]].append(number)
    members.pop("", None)
    for group in members.values():
        counts = Counter(parts[number] for number in group)
        part = max(counts, key=lambda name: (counts[name], name))
        part = next((parts[number] for number in group if number in moved), part)
        for number in group:
            parts[number] = part


def read_fixes(path: Path, catalogue: Catalogue) -> list[tuple[int, Fix]]:
    """Return the fixes in a file, which may have been edited.

    A UserError is raised if the file cannot be read, or if a line does not match the data or the format.
    """
    numbers = {catalogue.name(number): number for number in range(len(catalogue))}
    if len(numbers) < len(catalogue):
        raise UserError(f"--fixes {path}: several lines of the data name the same file: change {FIXED} itself.")
    allowed = {DROP: [""], RELABEL: catalogue.class_names, MOVE: ["train", "val", "test"]}
    fixes = []
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            if missing := {*COLUMNS[:3]} - {*(reader.fieldnames or ())}:
                raise UserError(f"--fixes {path}: the column {min(missing)} is missing: expected path, action and new.")
            for row in reader:
                name, action, new = (as_given(row[column] or "") for column in COLUMNS[:3])
                place = f"--fixes {path}, line {reader.line_num}"
                if name not in numbers:
                    raise UserError(f"{place}: {shown(name)} is not an image of the data.")
                if new not in allowed.get(action, ()) and not (action == GROUP and new):
                    listed = f"{DROP}, {RELABEL} with a class, {MOVE} with train, val or test, or {GROUP} with a name"
                    raise UserError(f"{place}: {shown(action)} {shown(new)}; expected {listed}.")
                fixes.append((numbers[name], Fix(action, new, 1.0, "given")))
    except (OSError, csv.Error) as error:
        raise UserError(f"--fixes {path}: cannot be read ({printable(str(error))}).") from None
    return fixes


def _page(facts: dict[str, Any], findings: Sequence[Finding], fixes: Fixes, catalogue: Catalogue) -> str:
    made = [one for one in fixes if one[1].action != GROUP]
    sections = []
    for kind, title in KINDS.items():
        of_kind = [one for one in findings if one.kind == kind]
        cards = [_card(one, made, catalogue) for one in of_kind[:SHOWN_OF_A_KIND]]
        sections.append({"kind": kind, "title": title, "count": len(of_kind), "cards": cards})
    return pages.render(
        TEMPLATE,
        **facts,
        images=len(catalogue),
        sections=sections,
        fixes=len(made),
        groups=len(fixes) - len(made),
        has_table=catalogue.are_files,
        written=pages.date_and_time(time.time()),
    )


def _card(finding: Finding, fixes: Fixes, catalogue: Catalogue) -> dict[str, Any]:
    numbers = [finding.image] + ([finding.other] if finding.other >= 0 else [])
    return {
        "pictures": [
            {
                "name": os.path.basename(catalogue.name(number)),
                "title": printable(catalogue.name(number)),
                "label": catalogue.class_names[catalogue.labels[number]],
                "part": str(catalogue.parts[number]),
                "data_uri": _data_uri(catalogue, number),
            }
            for number in numbers
        ],
        "reason": printable(finding.reason),
        "confidence": finding.confidence,
        "fix": ", ".join(f"{fix.action} {fix.new}".strip() for number, fix in fixes if number == finding.image),
    }


def _data_uri(catalogue: Catalogue, number: int) -> str:
    """Return a small picture as a data URI; empty if the image cannot be read."""
    try:
        picture = thumbnail(catalogue.image(number), THUMBNAIL_PIXELS)
    except ImageError:
        return ""
    return pages.data_uri(picture.convert("RGB"), "jpeg", quality=JPEG_QUALITY)
