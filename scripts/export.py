"""Exports a trained model to a file that other programs run, and checks that it computes what the model computes.

python scripts/export.py digits --format onnx                      # a run's name; for onnxruntime
python scripts/export.py digits --format onnx --precision int8     # quantized; prints what that costs and gains
python scripts/export.py logs/runs/digits --format torch-export    # for PyTorch without zerovision
python scripts/export.py model.safetensors --format safetensors --precision bf16 --data digits --output ~/models

Every file is opened again and compared with PyTorch on real images before it gets its name.
Exit code: 0 exported, 1 refused because the file differs by too much, 2 the arguments are wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from delivery.command_line import OneLineParser, add_image_flags, batch_size_type, positive_type, run_script
from delivery.export import FORMATS, PRECISIONS, ExportRefused, check_choice

REFUSED_EXIT_CODE = 1
MOST_IMAGES, MOST_THREADS = 10**6, 256


def export(given: argparse.Namespace) -> int:
    """Export the model that the command line names."""
    check_choice(given.format, given.precision)  # before the slow imports
    from delivery.evaluation_data import EvaluationChoice
    from delivery.export.export_model import export_model, show_export
    from delivery.export.job import ExportSettings

    settings = ExportSettings(
        given.model,
        given.format,
        given.precision,
        given.output,
        EvaluationChoice(given.data, "val", given.data_root, given.bad_images, given.allow_missing_classes),
        given.check_images,
        given.calibration_images,
        given.batch_size,
        given.max_accuracy_loss,
        given.threads,
    )
    try:
        exported = export_model(settings, lambda line: print(line, flush=True))
    except ExportRefused as refusal:
        print(f"export: {refusal}", file=sys.stderr)
        return REFUSED_EXIT_CODE
    show_export(exported, settings)
    return 0


def _percent_type(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{word!r}: expected points of top-1 from 0 to 100")
    return value


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("export", __doc__)
    formats = "; ".join(f"{name}: {entry.summary}" for name, entry in FORMATS.items())
    precisions = "; ".join(f"{name}: {text}" for name, text in PRECISIONS.items())
    count = positive_type(MOST_IMAGES)
    parser.add_argument("model", metavar="RUN_OR_WEIGHTS", help="A run's name or folder, or a safetensors file.")
    parser.add_argument("--format", required=True, metavar="|".join(FORMATS), help=f"{formats}.")
    parser.add_argument("--precision", default="fp32", metavar="|".join(PRECISIONS), help=f"{precisions} (onnx only).")
    parser.add_argument(
        "--output", default="", help="Folder of the files; default: export/ in the run's folder, or beside the weights."
    )
    add_image_flags(parser, "check")
    parser.add_argument(
        "--check-images", type=count, default=0, help="Most validation images to check on; default: all that fit 2 GB."
    )
    parser.add_argument(
        "--calibration-images", type=count, default=256, help="int8: training images that show the activations' ranges."
    )
    parser.add_argument(
        "--max-accuracy-loss", type=_percent_type, default=1.0, help="Points of top-1 that the file may lose."
    )
    parser.add_argument("--batch-size", type=batch_size_type, default=64, help="Images of one run, at most.")
    parser.add_argument("--threads", type=positive_type(MOST_THREADS), default=1, help="Threads of onnxruntime.")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run_script("export", parse, export))
