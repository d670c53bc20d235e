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

import argparse

from zerovision.planning.doctor import doctor_command


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    return doctor_command.parse(words, __doc__)
