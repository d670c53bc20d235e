"""Set up chosen ranks of a large run on one CPU, without the others: does it divide, fit, and leave how many files?

python scripts/check_setup.py --world 1024 --model-type mobilenet --strategy fsdp_stage3 --data fake --images 1281167
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planning.rank_setup import parse, run
from training.command_line import run_script


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("check_setup", lambda arguments: parse(arguments, __doc__), run)


if __name__ == "__main__":
    sys.exit(main())
