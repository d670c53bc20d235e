"""Find the first step at which two runs differ that should be equal, and what else is different about them.

bash scripts/launch_distributed.sh mobilenet ddp 2 16 2 --run-name a --log-hashes 10
bash scripts/launch_distributed.sh mobilenet ddp 1 16 2 --run-name b --log-hashes 10 --gradient-accumulation-steps 2
python scripts/bisect_runs.py a b

Exit code: 0 equal wherever both have hashes, 1 they differ, 2 a mistake.
"""

from __future__ import annotations

import argparse
import sys

from zerovision.training.config.command_line import OneLineParser, run_script


def bisect_runs(given: argparse.Namespace) -> int:
    """Print what was found."""
    from zerovision.delivery.trained_model import find_run

    runs = find_run(given.first), find_run(given.second)  # before the slow imports
    from zerovision.extras.bisect_runs import compare, lines_of

    found = compare(*runs)
    for line in lines_of(found):
        print(line)
    return 1 if found.step else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("bisect_runs", __doc__)
    parser.add_argument("first", metavar="RUN", help="A run's name or folder.")
    parser.add_argument("second", metavar="OTHER_RUN", help="That of the run to compare.")
    return parser.parse(arguments)


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("bisect_runs", parse, bisect_runs)


if __name__ == "__main__":
    sys.exit(main())
