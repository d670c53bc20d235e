"""Find a learning rate: a short training whose rate grows with every step, and the loss at each rate.

python scripts/find_learning_rate.py mobilenet ddp 2 16 5
python scripts/find_learning_rate.py --lowest 1e-4 --highest 10 basic_cnn ddp 2 16 7 --data fake --optimizer sgd

After the flags of its own come the arguments of scripts/launch_distributed.sh: any strategy by its name, any number of
ranks. Two hundred steps or more give a smooth curve: choose EPOCHS so. The curve is printed and in learning_rate.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from delivery.report.page import write_report
from planning.learning_rate import RangeTest, find_rate, parse
from training.command_line import run_script
from training.observe.run_folder import REPORT


def run(test: RangeTest) -> int:
    """Run the test and return the exit code; the report, which the training wrote before there was a curve, gets it."""
    code, page = find_rate(test), test.run_folder / REPORT
    if page.exists():
        write_report([test.run_folder], page)
    return code


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("find_learning_rate", lambda arguments: parse(arguments, __doc__), run)


if __name__ == "__main__":
    sys.exit(main())
