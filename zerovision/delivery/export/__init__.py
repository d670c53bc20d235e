"""Exports a trained model to a file that other programs can run; contains the table of formats and precisions.

Importing this package loads neither torch nor onnx, so that `--help` can print the table without delay.
"""

from __future__ import annotations

from typing import NamedTuple

from zerovision.training.base.errors import UserError, either


class ExportFormat(NamedTuple):
    """An entry of `FORMATS`.

    Attributes:
        write: name of the function (job, path) that writes a file; it may return the path of an fp32 file to compare.
        open: name of the function (path, threads) that opens a file as a `Forward`.
        extension: extension of the file name.
        precisions: the precisions that the format can store, as names in `PRECISIONS`.
        summary: short description for `--help`.
        has_graph: whether the format stores the computation graph, and can therefore include the preprocessing.
    """

    write: str
    open: str
    extension: str
    precisions: tuple[str, ...]
    summary: str
    has_graph: bool = True


HERE = "zerovision.delivery.export"
FORMATS = {
    "safetensors": ExportFormat(
        f"{HERE}.export_job:write_safetensors",
        f"{HERE}.export_job:open_safetensors",
        ".safetensors",
        ("fp32", "bf16"),
        "tensors and metadata, for Python with zerovision or timm",
        has_graph=False,
    ),
    "torch-export": ExportFormat(
        f"{HERE}.export_job:write_torch_export",
        f"{HERE}.export_job:open_torch_export",
        ".pt2",
        ("fp32", "bf16"),
        "graph and tensors, for plain PyTorch",
    ),
    "onnx": ExportFormat(
        f"{HERE}.onnx_format:write_onnx",
        f"{HERE}.onnx_format:open_onnx",
        ".onnx",
        ("fp32", "bf16", "int8"),
        "for onnxruntime and other programs that read ONNX",
    ),
}

PRECISIONS: dict[str, str] = {
    "fp32": "as trained",
    "bf16": "weights stored in 16 bits, arithmetic in fp32",
    "int8": "weights and activations in 8 bits",
}


class ExportRefused(Exception):
    """Raised if the exported file's results differ from the model's; the message is a single line."""


def check_choice(format_name: str, precision: str, *, with_preprocessing: bool) -> ExportFormat:
    """Return the format with this name, or raise a UserError if it does not support the precision or preprocessing."""
    chosen = FORMATS[format_name]
    if precision not in chosen.precisions:
        able = ", ".join(name for name, entry in FORMATS.items() if precision in entry.precisions)
        raise UserError(
            f"--format {format_name} supports {' and '.join(chosen.precisions)}, not {precision}: "
            f"use --format {able} for {precision}."
        )
    if with_preprocessing and not (chosen.has_graph and precision != "int8"):
        able = either(name for name, entry in FORMATS.items() if entry.has_graph)
        raise UserError(
            f"--with-preprocessing works with --format {able} in fp32 or bf16, not with {format_name} in {precision}: "
            "use one of those, or leave it out."
        )
    return chosen
