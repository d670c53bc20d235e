"""Breaks into trainings at random moments and checks that they end as if nothing had happened.

    python -m tests.chaos --faults 100 --seed 0

Each training runs under the real launcher and suffers several faults; at its end its weights, and all tensors of its
last checkpoint, must be those of an uninterrupted run, byte for byte. The exit code is 1 if any is not.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from rich.console import Console

from tests.chaos.campaign import Campaign
from tests.chaos.case import OracleError
from tests.chaos.faults import FAULTS
from tests.chaos.report import misses, print_report, write_records

WIDTH_OF_FILES = 120
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 128 + signal.SIGINT


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=100, help="Faults in all. (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="Seed of kinds, moments and victims. (default: 0)")
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="KIND", help="Only these.")
    parser.add_argument("--budget-minutes", type=float, default=float("inf"), help="No new faults after this time.")
    parser.add_argument("--json", type=Path, help="Write all records to this file.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first training: decides its case.")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Run the campaign, print its report, and return the exit code; Ctrl-C and SIGTERM end it in good order."""
    arguments = parse_arguments(words)
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES, soft_wrap=True)
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt_once)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    campaign = Campaign(arguments.seed, arguments.kinds, folder, console, arguments.first)
    stopped_with = 0
    try:
        campaign.run(arguments.faults, arguments.budget_minutes)
    except KeyboardInterrupt:
        stopped_with = INTERRUPTED
        console.print("interrupted: the training under way does not count")
    except OracleError as error:
        stopped_with = 1
        console.print(str(error), markup=False, highlight=False)
    missed = misses(campaign.results)
    if not missed:
        shutil.rmtree(folder)
    print_report(console, campaign.results, campaign.skipped)
    if arguments.json:
        write_records(arguments.json, arguments.seed, campaign.results, campaign.skipped)
    return stopped_with or (1 if missed else 0)


def _interrupt_once(_number: int, _frame: FrameType | None) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the processes and mounts have to be taken away undisturbed
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
