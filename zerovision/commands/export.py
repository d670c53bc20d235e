"""Exports a trained model to a file that other programs run, and checks that it computes what the model computes.

python scripts/export.py digits --format onnx                      # a run's name; for onnxruntime
python scripts/export.py digits --format onnx --precision int8     # quantized; prints what that costs and gains
python scripts/export.py digits --format onnx --with-preprocessing  # takes pictures, gives probabilities
python scripts/export.py logs/runs/digits --format torch-export    # for PyTorch without zerovision
python scripts/export.py model.safetensors --format safetensors --precision bf16 --data digits --output ~/models

Every file is opened again and compared with PyTorch on real images before it gets its name.
Exit code: 0 exported, 1 refused because the file differs by too much, 2 the arguments are wrong.
"""

from __future__ import annotations

import argparse
import sys

from zerovision.delivery.export import ExportRefused, check_choice
from zerovision.delivery.flags import export_parser
from zerovision.training.config.command_line import run_script


def export(given: argparse.Namespace) -> int:
    """Export the model that the command line names."""
    check_choice(given.format, given.precision, with_preprocessing=given.with_preprocessing)
    from zerovision.delivery.trained_model import find_model

    find_model(given.model)  # before the slow imports
    from zerovision.delivery.export.export_job import ExportSettings
    from zerovision.delivery.export.export_model import export_model, show_export

    settings = ExportSettings(**vars(given))
    try:
        exported = export_model(settings)
    except ExportRefused as refusal:
        print(f"export: {refusal}", file=sys.stderr)
        return 1
    show_export(exported, settings)
    return 0


parse = export_parser(__doc__).parse


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("export", parse, export)


if __name__ == "__main__":
    sys.exit(main())
