"""Train one step of a run again, from the checkpoint before it, and show what it was given and what it did.

python scripts/replay.py digits --step 100                  # writes logs/runs/digits/replay-100: batch.png, step.json

Exit code: 0 its bytes are those of the run, or the run has no hashes (--log-hashes), 1 they differ, 2 a mistake.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from zerovision.training.base.errors import UserError
from zerovision.training.config.command_line import OneLineParser, run_script

MOST_STEPS = 10**9


def replay(given: argparse.Namespace) -> int:
    """Replay the step that the command line names."""
    from zerovision.delivery.trained_model import find_run

    run = find_run(given.run)  # before the slow imports
    from zerovision.extras.replay import differences, replay, write_step

    output = Path(os.path.expanduser(given.output)) if given.output else run / f"replay-{given.step}"
    if output.exists():
        raise UserError(f"'{output}' exists: move it away, or give another folder with --output.")
    watched = replay(run, given.step)
    differing = differences(watched, run)
    try:
        for line in write_step(watched, differing, output):
            print(line)
    except OSError as error:
        raise UserError(f"cannot write '{output}': {error.strerror or error}.") from None
    print(f"output       {output}")
    return 1 if differing else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("replay", __doc__)
    parser.add_argument("run", metavar="RUN", help="A run's name or folder, in which nothing is changed.")
    parser.add_number("--step", 1, MOST_STEPS, required=True, help="Optimizer step of the run, from 1.")
    parser.add_argument("--output", default="", help="New folder of the files; default: replay-STEP in the run's.")
    return parser.parse(arguments)


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("replay", parse, replay)


if __name__ == "__main__":
    sys.exit(main())
