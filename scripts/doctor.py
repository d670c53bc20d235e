"""Says what is wrong before a run starts.

python scripts/doctor.py --check-data /data/flowers
python scripts/doctor.py --check-data digits

Exit code: 0 all is well, 1 images cannot be used, 2 the arguments or the data set as a whole are wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.data import DATASETS, DataOptions
from training.errors import USER_ERROR_EXIT_CODE, UserError

SOMETHING_WRONG_EXIT_CODE = 1
ROWS_SHOWN = 20


def main() -> int:
    """Run the check that the command line asks for and return the exit code."""
    options = _parse_options()
    try:
        return _check_data(options)
    except UserError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE


def _parse_options() -> DataOptions:
    defaults = DataOptions()
    names = "; ".join(f"{entry.usage}: {entry.summary}" for entry in DATASETS.values())
    parser = argparse.ArgumentParser(description="Says what is wrong before a run starts.", allow_abbrev=False)
    parser.add_argument(
        "--check-data",
        metavar="DATA",
        required=True,
        help=f"decode every image of a data set and count its classes ({names.replace('%', '%%')})",
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=defaults.val_fraction,
        help="share held out where one folder is split, above 0 and below 1 (default: %(default)s)",
    )
    parser.add_argument(
        "--data-root", default=defaults.data_root, help="where torchvision data sets are kept (default: %(default)s)"
    )
    given = parser.parse_args()
    return DataOptions(data=given.check_data, val_fraction=given.val_fraction, data_root=given.data_root)


def _check_data(options: DataOptions) -> int:
    # after the arguments are parsed: these load torch, and --help should not wait for that
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from planning.data_check import check_data

    console = Console(highlight=False, soft_wrap=True)
    report = check_data(options)
    table = Table("class", "train", "validation", title=escape(f"{options.data}: {len(report.class_names)} classes"))
    rows = list(zip(report.class_names, report.train_counts, report.val_counts, strict=True))
    for name, train, val in rows[:ROWS_SHOWN]:
        table.add_row(escape(name), str(train), str(val))
    if len(rows) > ROWS_SHOWN:
        table.add_row(f"and {len(rows) - ROWS_SHOWN} more", "", "")
    table.add_row("all", str(sum(report.train_counts)), str(sum(report.val_counts)))
    console.print(table)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"labels {report.label_range[0]} to {report.label_range[1]}")
    if report.smallest and report.largest:
        smallest, largest = (f"{width}x{height}" for width, height in (report.smallest, report.largest))
        console.print(f"smallest image {smallest}, largest {largest} pixels")
    for path, reason in report.unreadable:
        console.print(f"unreadable: {path!r}: {reason}", markup=False)
    console.print(f"{len(report.unreadable)} of {report.images} images cannot be used")
    return SOMETHING_WRONG_EXIT_CODE if report.unreadable else 0


if __name__ == "__main__":
    sys.exit(main())
