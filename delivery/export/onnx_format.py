"""ONNX: the file that onnxruntime and other serving systems run, in fp32, with weights in bf16, or in int8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from onnx import ModelProto

from delivery.export.int8 import quantize
from delivery.export.job import ExportJob, Run, Written
from delivery.export.onnx_graph import check_and_write, describe, export_graph, store_in_bf16
from delivery.export.onnx_session import open_session


def _as_it_is(job: ExportJob, model: ModelProto, folder: Path) -> tuple[ModelProto, Written]:
    return model, Written()


def _in_bf16(job: ExportJob, model: ModelProto, folder: Path) -> tuple[ModelProto, Written]:
    # onnxruntime's CPU kernels for convolutions take no bf16: stored so, computed in fp32, the file runs everywhere.
    store_in_bf16(model)
    return model, Written()


STORED_AS: dict[str, Callable[[ExportJob, ModelProto, Path], tuple[ModelProto, Written]]] = {
    "fp32": _as_it_is,
    "bf16": _in_bf16,
    "int8": quantize,
}


def write(job: ExportJob, path: Path) -> Written:
    """Export the graph, store it in the precision, and write it; other files may be left beside it."""
    model, written = STORED_AS[job.precision](job, export_graph(job), path.parent)
    describe(model, job)
    check_and_write(model, path)
    return written


def open_exported(path: Path, threads: int) -> Run:
    """Open the file in onnxruntime on the CPU."""
    return open_session(path.read_bytes(), threads)
