"""Evaluates a trained model: exact scores, and the images on which it errs.

python scripts/evaluate.py digits                                   # a run's name, on what it held out
python scripts/evaluate.py logs/runs/digits --data ~/more-photos    # other images: one folder per class
python scripts/evaluate.py model.safetensors --data digits
torchrun --nproc_per_node=2 scripts/evaluate.py digits              # the same numbers, faster

Writes scores.json, per_class.csv, confusion.csv, confusion.png, worst.csv and worst.png. Only safetensors are read.
"""

from __future__ import annotations

import argparse
import os
import sys

from zerovision.delivery.flags import evaluate_parser
from zerovision.training.config.command_line import run_script


def evaluate(given: argparse.Namespace) -> int:
    """Evaluate the model that the command line names, on as many ranks as were started; every rank calls this."""
    from zerovision.delivery.trained_model import find_model

    find_model(given.model)  # before the slow imports
    import zerovision.delivery.evaluate

    arguments = vars(given)
    del arguments["local_rank"]  # which torchrun's and DeepSpeed's launchers add; the ranks read variables
    zerovision.delivery.evaluate.evaluate(**arguments, verbose=True)
    return 0


parse = evaluate_parser(__doc__).parse


def main() -> int:
    """Run the command line and leave with its exit code."""
    exit_code = run_script("evaluate", parse, evaluate)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # see train_distributed.py: taking the interpreter down under gloo's threads may abort


if __name__ == "__main__":
    sys.exit(main())
