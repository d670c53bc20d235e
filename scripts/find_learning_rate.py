"""Find a learning rate: a training with each of a few rates, and their final losses.

python scripts/find_learning_rate.py mobilenet ddp 2 16 5
python scripts/find_learning_rate.py --lowest 1e-4 --highest 10 basic_cnn ddp 2 16 7 --data fake --optimizer sgd

After the flags of its own come the arguments of scripts/launch_distributed.sh: any strategy by its name, any number of
ranks. The first rate is their --learning-rate; from there it goes up or down by factors of about 3 as long as the loss
gets lower. A hundred steps or more tell rates apart: choose EPOCHS so.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.command_line import run_script
from training.observe.run_folder import REPORT

if TYPE_CHECKING:
    from planning.learning_rate import RateSearch


# Imported late: outside the environment `run_script` says in one line what is missing.
def parse(words: list[str]) -> RateSearch:
    """Read the command line."""
    from planning.learning_rate import parse

    return parse(words, __doc__)


def run(asked: RateSearch) -> int:
    """Run the search and return the exit code; the best run's report, which was written before, gets its chart."""
    from delivery.report.page import write_report
    from planning.learning_rate import search

    code, folder = search(asked)
    if folder is not None and (folder / REPORT).exists():
        write_report([folder], folder / REPORT)
    return code


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("find_learning_rate", parse, run)


if __name__ == "__main__":
    sys.exit(main())
