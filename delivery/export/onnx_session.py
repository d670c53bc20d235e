"""Runs an ONNX file with onnxruntime on the CPU."""

from __future__ import annotations

import onnxruntime
import torch

from delivery.export.job import Run
from delivery.export.sidecar import INPUT_NAME, OUTPUT_NAME

ERRORS_ONLY = 3  # onnxruntime's log levels: 2 warnings, 3 errors


def open_session(content: bytes, threads: int) -> Run:
    """Return the function from images to logits that an ONNX file's content stands for.

    Args:
        content: of the file.
        threads: that share the work of one operator.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(images: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run([OUTPUT_NAME], {INPUT_NAME: images.numpy()})[0])

    return run
