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

from delivery.image_flags import add_image_flags
from training.command_line import OneLineParser, run_script
from training.config import LARGEST_BATCH


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
        batch_size=given.batch_size,
        precision=given.precision,
        output=given.output,
        verbose=True,
    )
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("evaluate", __doc__)
    parser.add_argument("model", metavar="RUN_OR_WEIGHTS", help="A run's name or folder, or a safetensors file.")
    add_image_flags(parser, "evaluate")
    parser.add_choice(
        "--split",
        ("auto", "val", "train", "all"),
        default="auto",
        help="Part of the data; auto: what the run held out, or all of a folder that it was not trained on.",
    )
    parser.add_number("--batch-size", 1, LARGEST_BATCH, default=64, help="Images per rank and forward pass.")
    parser.add_choice("--precision", ("auto", "bf16", "fp16", "fp32"), default="auto", help="As in training.")
    parser.add_argument("--output", default="", help="Folder of the files; default: in the run's folder.")
    parser.add_local_rank()
    return parser.parse(words)


def main() -> int:
    """Do what the command line says and return the exit code."""
    return run_script("evaluate", parse, evaluate)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # see train_distributed.py: taking the interpreter down under gloo's threads may abort
