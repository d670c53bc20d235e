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

from delivery.export import FORMATS, PRECISIONS, ExportRefused, check_choice
from delivery.image_flags import add_image_flags
from training.command_line import OneLineParser, run_script
from training.config import LARGEST_BATCH

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


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("export", __doc__)
    formats = "; ".join(f"{name}: {entry.summary}" for name, entry in FORMATS.items())
    precisions = "; ".join(f"{name}: {text}" for name, text in PRECISIONS.items())
    parser.add_argument("model", metavar="RUN_OR_WEIGHTS", help="A run's name or folder, or a safetensors file.")
    parser.add_argument("--format", required=True, metavar="|".join(FORMATS), help=f"{formats}.")
    parser.add_argument("--precision", default="fp32", metavar="|".join(PRECISIONS), help=f"{precisions} (onnx only).")
    parser.add_argument(
        "--output", default="", help="Folder of the files; default: export/ in the run's folder, or beside the weights."
    )
    add_image_flags(parser, "check")
    images = "Most validation images to check on; default: all that fit 2 GB."
    parser.add_number("--check-images", 1, MOST_IMAGES, default=0, help=images)
    images = "int8: training images that show the activations' ranges."
    parser.add_number("--calibration-images", 1, MOST_IMAGES, default=256, help=images)
    points = "points of top-1"
    parser.add_number(
        "--max-accuracy-loss",
        0.0,
        100.0,
        kind=points,
        default=1.0,
        help=f"{points.capitalize()} that the file may lose.",
    )
    parser.add_number("--batch-size", 1, LARGEST_BATCH, default=64, help="Images of one run, at most.")
    parser.add_number("--threads", 1, MOST_THREADS, default=1, help="Threads of onnxruntime.")
    return parser.parse(words)


if __name__ == "__main__":
    sys.exit(run_script("export", parse, export))
