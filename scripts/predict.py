"""Predicts the classes of images with a trained model.

python scripts/predict.py digits photo.png other.jpg
python scripts/predict.py logs/runs/digits ~/photos --format csv --output labels.csv
find ~/photos -newer last | python scripts/predict.py digits - --format json
curl -s https://example.org/cat.jpg | python scripts/predict.py digits -

Exit code: 0 all images were labelled, 1 some could not be read (named on standard error), 2 the arguments are wrong.
Only safetensors are read.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.command_line import OneLineParser, run_script
from training.config import LARGEST_BATCH

SOME_UNREADABLE_EXIT_CODE = 1
LARGEST_TOP_K = 1000


def predict(given: argparse.Namespace) -> int:
    """Predict the images that the command line names; the predictions go to standard output or a file."""
    import delivery.predict
    from delivery.prediction_output import write_predictions

    predictions = delivery.predict.predict(
        given.model,
        given.images,
        top_k=given.top_k,
        flip=given.flip,
        batch_size=given.batch_size,
        device=given.device,
        decode=given.decode,
    )
    unreadable = write_predictions(predictions, given.format, given.output, given.top_k)
    return SOME_UNREADABLE_EXIT_CODE if unreadable else 0


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("predict", __doc__)
    parser.add_argument("model", metavar="RUN_OR_WEIGHTS", help="A run's name or folder, or a safetensors file.")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="Files, folders, or -: one image, or paths, on standard input."
    )
    parser.add_number("--top-k", 1, LARGEST_TOP_K, default=3, help="Classes named for each image.")
    parser.add_choice("--format", ("table", "csv", "json"), default="table", help="json: one object a line.")
    parser.add_argument("--output", default="", help="File to write in place of standard output.")
    parser.add_argument("--flip", action="store_true", help="Predict the mirrored image too; average both.")
    parser.add_number("--batch-size", 1, LARGEST_BATCH, default=64, help="Images of one forward pass.")
    parser.add_choice("--device", ("cpu", "cuda"), help="Default: a GPU if there is one.")
    parser.add_choice(
        "--decode", ("cpu", "exact"), default="cpu", help="As in training: JPEG files shrunk, or in full."
    )
    return parser.parse(words)


def main() -> int:
    """Do what the command line says and return the exit code."""
    return run_script("predict", parse, predict)


if __name__ == "__main__":
    try:
        exit_code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # as in `predict ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_code = 0
    sys.exit(exit_code)
