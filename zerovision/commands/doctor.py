"""Finds out what is wrong before a run starts.

python scripts/doctor.py                                            # this machine
python scripts/doctor.py --data ~/photos                            # and whether this data set loads
python scripts/doctor.py --hostfile hostfile.txt --gpus-per-node 8  # all of its machines, and the network between them
python scripts/doctor.py --hosts node01,node02 --json
python scripts/doctor.py --check-data ~/photos                      # every image of a data set

Inside a Slurm job it examines the job's machines. Arguments after -- are the training's own (train_distributed.py
--help). Exit code: 0 nothing is wrong, 1 something is, 2 a mistake in the arguments.
"""

from __future__ import annotations

import sys

from zerovision.planning.doctor.doctor_command import parse, run
from zerovision.training.config.command_line import run_script


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("doctor", lambda arguments: parse(arguments, __doc__), run)


if __name__ == "__main__":
    sys.exit(main())
