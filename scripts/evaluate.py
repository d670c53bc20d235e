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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from delivery.flags import evaluate_parser
from training.config.command_line import run_script


def evaluate(given: argparse.Namespace) -> int:
    """Evaluate the model that the command line names, on as many ranks as were started; every rank calls this."""
    import delivery.evaluate

    delivery.evaluate.evaluate(
        given.model,
        given.data,
        split=given.split,
        data_root=given.data_root,
        bad_images=given.bad_images,
        allow_missing_classes=given.allow_missing_classes,
        flip=given.flip,
        shift_pixels=given.shift_pixels,
        batch_size=given.batch_size,
        precision=given.precision,
        output=given.output,
        verbose=True,
    )
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    return evaluate_parser(__doc__).parse(words)


if __name__ == "__main__":
    exit_code = run_script("evaluate", parse, evaluate)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # see train_distributed.py: taking the interpreter down under gloo's threads may abort
