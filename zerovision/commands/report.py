"""Write the report of a run, or of several side by side: a single HTML file that needs no network.

python scripts/report.py digits                                # writes logs/runs/digits/report.html
python scripts/report.py digits --watch                        # again whenever the run has logged, until it ends
python scripts/report.py digits digits-again --output both.html

RUN is a run's name in logs/runs, or its folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from zerovision.training.base.errors import printable
from zerovision.training.base.run_folder import REPORT
from zerovision.training.config.command_line import OneLineParser, run_script


def report(given: argparse.Namespace) -> int:
    """Write the page, and with --watch keep it up to date."""
    from zerovision.delivery.trained_model import find_run

    folders = list(dict.fromkeys(find_run(run) for run in given.runs))  # before the slow imports
    from zerovision.delivery.report.comparison import compare
    from zerovision.delivery.report.page import watch, write_report

    default = folders[0] / REPORT if len(folders) == 1 else Path(REPORT)
    output = Path(os.path.expanduser(given.output)) if given.output else default
    if given.watch:
        watch(folders, output, print)
    else:
        write_report(folders, output)
    for sentence in compare(folders):
        print(printable(sentence))
    print(f"report       {output}")
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("report", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="A run's name or folder; several are compared.")
    parser.add_argument(
        "--output", default="", help="File to write; default: report.html in the run's folder, or here for several."
    )
    parser.add_argument("--watch", action="store_true", help="Write it again while the run trains, until it ends.")
    return parser.parse(arguments)


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("report", parse, report)


if __name__ == "__main__":
    sys.exit(main())
