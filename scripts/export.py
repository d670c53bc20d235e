"""Turns a trained model into a file that other programs run, and proves that it does what the model does.

python scripts/export.py digits --format onnx                      # a run's name; for onnxruntime
python scripts/export.py digits --format onnx --precision int8     # quantized; says what that costs and gains
python scripts/export.py logs/runs/digits --format torch-export    # for PyTorch without zerovision
python scripts/export.py model.safetensors --format safetensors --precision bf16 --data digits --output ~/models

Every file is opened again and compared with PyTorch on real images before it gets its name.
Exit code: 0 exported, 1 refused because the file differs by too much, 2 the arguments are wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from delivery.command_line import OneLineParser, add_image_flags, batch_size_type, positive_type, run_script
from delivery.export import FORMATS, PRECISIONS, ExportRefused, check_choice
from training.errors import printable

if TYPE_CHECKING:
    from delivery.export.export_model import Exported

REFUSED_EXIT_CODE = 1
MOST_IMAGES, MOST_THREADS = 10**6, 256


def export(given: argparse.Namespace) -> int:
    """Export the model that the command line names."""
    check_choice(given.format, given.precision)  # before the slow imports
    from delivery.evaluation_data import EvaluationChoice
    from delivery.export.export_model import ExportRequest, export_model

    request = ExportRequest(
        given.model,
        given.format,
        given.precision,
        given.output,
        # The part that the model was not trained on; calibration takes the other one.
        EvaluationChoice(given.data, "val", given.data_root, given.bad_images, given.allow_missing_classes),
        given.check_images,
        given.calibration_images,
        given.batch_size,
        given.max_accuracy_loss,
        given.threads,
    )
    try:
        exported = export_model(request, lambda line: print(line, flush=True))
    except ExportRefused as refusal:
        print(f"export: {refusal}", file=sys.stderr)
        return REFUSED_EXIT_CODE
    _show(exported, given.precision, given.threads)
    return 0


def _show(exported: Exported, precision: str, threads: int) -> None:
    found = exported.agreement
    sizes = ", ".join(map(str, found.batch_sizes))
    print(f"compared with PyTorch on {found.images} images ({printable(exported.images)}), in batches of {sizes}")
    print(f"  largest difference of a logit  {found.difference:.3g}  (largest logit {found.scale:.3g})")
    print(f"  root mean square difference    {found.rms_share:.2%} of the logits")
    print(f"  between batch sizes            {found.batch_difference:.3g}")
    print(f"  equal top-1                    {found.equal_top1:.2%}")
    print(f"  top-1                          {found.model_top1:.4f} -> {found.file_top1:.4f}")
    if exported.comparison is not None:
        _show_comparison(exported, precision, threads)
    for file in exported.files:
        print(f"file  {printable(str(file))} ({os.path.getsize(file):,} bytes)")


def _show_comparison(exported: Exported, precision: str, threads: int) -> None:
    """Print accuracy, size and time per image, fp32 and the smaller precision side by side."""
    from rich.console import Console
    from rich.table import Table

    from delivery.export.export_model import LATENCY_BATCHES
    from delivery.export.latency import processor_name

    comparison, found = exported.comparison, exported.agreement
    assert comparison is not None
    times = [f"ms/image, batch {size}" for size in LATENCY_BATCHES]
    table = Table("", "top-1", "bytes", "size", *times, box=None, header_style="bold")
    for name, top1 in (("fp32", found.model_top1), (precision, found.file_top1)):
        share = comparison.sizes[name] / comparison.sizes["fp32"]
        shown = [f"{comparison.latencies[name, size]:.3f}" for size in LATENCY_BATCHES]
        table.add_row(name, f"{top1:.4f}", f"{comparison.sizes[name]:,}", f"{share:.3f}", *shown)
    for column in table.columns[1:]:
        column.justify = "right"
    written = exported.written
    stored = " (weights stored in int8)" if written.all_stored else ""
    left = f" layers{stored}: {', '.join(written.left_in_fp32)}" if written.left_in_fp32 else " layers"
    console = Console(highlight=False)
    console.print(table)
    print(f"  {written.calibration} ranges; computed in fp32: {len(written.left_in_fp32)} of {written.layers}{left}")
    print(f"  onnxruntime with {threads} thread(s) on {processor_name()}; medians over shuffled rounds")


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
