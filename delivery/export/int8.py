"""int8: static post-training quantization of an ONNX graph by onnxruntime.

A real number r is kept as an integer q of 8 bits, r = scale * (q - zero_point): equation 1 of Jacob et al. 2018,
arXiv:1712.05877. Weights have one scale per output channel and zero point 0; activations one scale and zero point per
tensor, from the range that calibration images show. onnxruntime's quantizer writes that as pairs of QuantizeLinear and
DequantizeLinear nodes (QDQ), and its kernels compute in integers between them. LSTMs, which it has no static int8
kernel for, stay in fp32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import ModelProto
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quant_pre_process,
    quantize_static,
)

from delivery.export.output_folder import INPUT_NAME

STATIC_OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")  # with a constant as their second operand
# What passes 8-bit values on as they are; quantized only behind a layer that is.
PASSING_OPERATORS = ("Relu", "Clip", "MaxPool", "Reshape", "Transpose", "Flatten")
CALIBRATION_BATCH = 32


def quantize(model: ModelProto, calibration: torch.Tensor, fp32: Path) -> ModelProto:
    """Return a graph in int8.

    Args:
        model: as `export_graph` returned it.
        calibration: images of the training split, float32 [M, C, S, S].
        fp32: the file of `model`; temporary files are left beside it.
    """
    prepared, quantized = fp32.with_name("prepared.onnx"), fp32.with_name("quantized.onnx")
    quant_pre_process(fp32, prepared, skip_optimization=True, skip_symbolic_shape=True)
    constant_names = {tensor.name for tensor in model.graph.initializer}
    layers = [
        node.name
        for node in model.graph.node
        if node.op_type in PASSING_OPERATORS or (node.op_type in STATIC_OPERATORS and node.input[1] in constant_names)
    ]
    quantize_static(
        prepared,
        quantized,
        _CalibrationBatches(calibration),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=[*STATIC_OPERATORS, *PASSING_OPERATORS],
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        nodes_to_quantize=layers,
        calibrate_method=CalibrationMethod.MinMax,
        # one batch at a time: else all activations of all images are held at once
        extra_options={"CalibStridedMinMax": 1},
    )
    result = onnx.load(quantized)
    del result.graph.value_info[:]  # shapes of inner tensors: every reader infers them
    return result


class _CalibrationBatches(CalibrationDataReader):
    """Images in batches, as onnxruntime's calibration asks for them."""

    def __init__(self, images: torch.Tensor) -> None:
        self._batches = images.split(CALIBRATION_BATCH)
        self.set_range(0, len(self._batches))

    def __len__(self) -> int:
        return len(self._batches)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Begin anew, with a part of the batches."""
        self._remaining = iter(self._batches[start_index:end_index])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next batch, None at the end."""
        batch = next(self._remaining, None)
        return None if batch is None else {INPUT_NAME: batch.numpy()}
