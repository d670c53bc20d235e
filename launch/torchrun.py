"""torchrun without its page of failure table, and with the exit code of the rank that failed first.

    python launch/torchrun.py --nproc_per_node 2 scripts/train_distributed.py --model-type mobilenet

torchrun itself always exits with 1, so that a user's mistake (2) and a clean stop (143) would look alike.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main(arguments: list[str]) -> int:
    """Run torchrun with these arguments and return the exit code; 128 + n for a rank ended by signal n."""
    logging.disable(logging.ERROR)  # of this process only: the ranks print their own errors
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        exit_code = error.get_first_failure()[1].exitcode
        return exit_code if exit_code > 0 else 128 - exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
