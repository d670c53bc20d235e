"""Says what a trained model takes images for.

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
from training.errors import UserError, printable

SOME_UNREADABLE_EXIT_CODE = 1
LARGEST_TOP_K = 1000


def label_images(given: argparse.Namespace) -> int:
    """Label what the command line names; the answers go to standard output or a file."""
    import torch

    from delivery.prediction import STDIN, list_images, predict
    from delivery.prediction_output import open_output
    from delivery.trained_model import find_model
    from training.checkpoint.weights import load_model
    from training.data.reading.images import MAX_FILE_BYTES, ImageError
    from training.parallel.precision import use_exact_fp32

    use_exact_fp32()
    has_gpu = torch.cuda.is_available()
    if given.device == "cuda" and not has_gpu:
        raise UserError("--device cuda: PyTorch finds no GPU here; leave it out, or give --device cpu.")
    module, metadata = load_model(find_model(given.model).weights)
    device = torch.device(given.device or ("cuda" if has_gpu else "cpu"))
    images = list_images(given.images, sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if STDIN in given.images else b"")
    answers = predict(
        images,
        module,
        metadata,
        device=device,
        batch_size=given.batch_size,
        top_k=given.top_k,
        flip=given.flip,
        decode=given.decode,
    )
    unreadable = 0
    with open_output(given.format, given.output, min(given.top_k, len(metadata["class_names"]))) as output:
        for answer in answers:
            if isinstance(answer, ImageError):
                unreadable += 1
                print(f"predict: passed over {answer.path!r}: {printable(answer.reason)}", file=sys.stderr)
                continue
            if answer.note:
                print(f"predict: note on {answer.image!r}: {printable(answer.note)}", file=sys.stderr)
            output.write(answer)
    if unreadable:
        print(f"predict: {unreadable} image(s) could not be read", file=sys.stderr)
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
    parser.add_argument("--flip", action="store_true", help="Ask the mirrored image too, and take the mean of both.")
    parser.add_number("--batch-size", 1, LARGEST_BATCH, default=64, help="Images of one forward pass.")
    parser.add_choice("--device", ("cpu", "cuda"), help="Default: a GPU where there is one.")
    parser.add_choice(
        "--decode", ("cpu", "exact"), default="cpu", help="As in training: JPEG files shrunk, or in full."
    )
    return parser.parse(words)


def main() -> int:
    """Do what the command line says and return the exit code."""
    return run_script("predict", parse, label_images)


if __name__ == "__main__":
    try:
        exit_code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # as in `predict ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_code = 0
    sys.exit(exit_code)
