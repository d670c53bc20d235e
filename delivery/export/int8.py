"""int8: static post-training quantization of an ONNX graph, which is refused where it costs too much accuracy.

A real number r is kept as an integer q of 8 bits, r = scale * (q - zero_point): equation 1 of Jacob et al. 2018,
arXiv:1712.05877. Weights have one scale per output channel and zero point 0; activations one scale and zero point per
tensor, from the range that calibration images show. onnxruntime's quantizer writes that as pairs of QuantizeLinear and
DequantizeLinear nodes (QDQ), and its kernels compute in integers between them.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quant_pre_process,
    quantize_static,
)

from delivery.export import ExportRefused
from delivery.export.comparison import ROUNDING
from delivery.export.export_job import ExportJob, Written, run_in_batches
from delivery.export.onnx_format import constants, open_session
from delivery.export.output_folder import INPUT_NAME

CALIBRATION_METHODS = {"MinMax": CalibrationMethod.MinMax, "Percentile": CalibrationMethod.Percentile}
STATIC_OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")  # with a constant as their second operand
# What passes 8-bit values on as they are; quantized only behind a layer that is.
PASSING_OPERATORS = ("Relu", "Clip", "MaxPool", "Reshape", "Transpose", "Flatten")
# An LSTM has W [directions, 4H, inputs] and R [directions, 4H, H]: one scale for each row of each gate, which both
# directions share, because DequantizeLinear knows one axis.
LSTM_OPERANDS, LSTM_AXIS = (1, 2), 1
LARGEST_INT8 = 127
CALIBRATION_BATCH = 32


def quantize(job: ExportJob, model: ModelProto, folder: Path) -> tuple[ModelProto, Written]:
    """Quantize a graph, with the first method of calibration that loses no more accuracy than the job allows.

    Args:
        job: the export, with calibration images.
        model: as `export_graph` returned it.
        folder: for temporary files.

    Raises:
        ExportRefused: if each loses more.
    """
    assert job.calibration is not None  # `export_model` loads them for int8
    fp32, prepared = folder / "fp32.onnx", folder / "prepared.onnx"
    fp32.write_bytes(model.SerializeToString())
    quant_pre_process(fp32, prepared, skip_optimization=True, skip_symbolic_shape=True)
    lost: dict[str, float] = {}
    for method in CALIBRATION_METHODS:
        candidate = _quantized(model, prepared, job.calibration, method)
        session = open_session(candidate.SerializeToString(), job.settings.threads)
        lost[method] = job.check.points_lost(run_in_batches(session, job.check.images, job.settings.batch_size))
        job.log(f"int8, {method} ranges of {len(job.calibration)} images: {lost[method]:.2f} points of top-1 lost")
        if lost[method] <= job.settings.max_accuracy_loss + ROUNDING:
            return candidate, Written(fp32, method)
    raise ExportRefused(
        f"refused: int8 loses {min(lost.values()):.2f} points of top-1, allowed are "
        f"{job.settings.max_accuracy_loss:g}: give --precision bf16, more --calibration-images, or --max-accuracy-loss."
    )


def _quantized(model: ModelProto, prepared: Path, calibration: torch.Tensor, method: str) -> ModelProto:
    """Return a graph in int8; LSTMs are stored in int8 only, because onnxruntime has no static int8 LSTM.

    Args:
        model: the graph.
        prepared: its file, as `quant_pre_process` has left it.
        calibration: images, float32 [M, C, S, S].
        method: a name of `CALIBRATION_METHODS`.
    """
    constant_names, result = constants(model).keys(), prepared.with_name("candidate.onnx")
    layers = [
        node.name
        for node in model.graph.node
        if node.op_type in PASSING_OPERATORS or (node.op_type in STATIC_OPERATORS and node.input[1] in constant_names)
    ]
    with contextlib.redirect_stdout(io.StringIO()):  # the histogram collector reports its progress
        quantize_static(
            prepared,
            result,
            _CalibrationBatches(calibration),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=[*STATIC_OPERATORS, *PASSING_OPERATORS],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_quantize=layers,
            calibrate_method=CALIBRATION_METHODS[method],
            # one batch at a time: else all activations of all images are held at once
            extra_options={"CalibStridedMinMax": 1},
        )
    quantized = onnx.load(result)
    for node in [node for node in quantized.graph.node if node.op_type == "LSTM"]:
        _store_in_int8(quantized, node)
    del quantized.graph.value_info[:]  # shapes of inner tensors: every reader infers them
    return quantized


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


def _store_in_int8(model: ModelProto, lstm: NodeProto) -> None:
    """Store an LSTM's weights in int8, one scale per output, and put a DequantizeLinear behind them."""
    stored = constants(model)
    for place in LSTM_OPERANDS:
        name = lstm.input[place]
        values = numpy_helper.to_array(stored[name])
        scale = np.abs(values).max(axis=(0, 2)) / LARGEST_INT8
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        integers = np.rint(values / scale[:, None]).astype(np.int8)
        operands = [f"{name}_{what}" for what in ("quantized", "scale", "zero_point")]
        stored[name].CopyFrom(numpy_helper.from_array(integers, operands[0]))
        zero_points = helper.make_tensor(operands[2], TensorProto.INT8, scale.shape, bytes(len(scale)), raw=True)
        model.graph.initializer.extend([numpy_helper.from_array(scale, operands[1]), zero_points])
        widen = helper.make_node("DequantizeLinear", operands, [name], f"{name}_DequantizeLinear", axis=LSTM_AXIS)
        model.graph.node.insert(0, widen)
