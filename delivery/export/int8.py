"""int8: static post-training quantization of an ONNX graph, all layers if accuracy allows it, else all but a few.

A real number r is kept as an integer q of 8 bits, r = scale * (q - zero_point): equation 1 of Jacob et al. 2018,
arXiv:1712.05877. Weights have one scale per output channel and zero point 0; activations one scale and zero point per
tensor, from the range that calibration images show. onnxruntime's quantizer writes that as pairs of QuantizeLinear and
DequantizeLinear nodes (QDQ), and its kernels compute in integers between them. The layers that stay in fp32 are those
that int8 harms most.
"""

from __future__ import annotations

import contextlib
import copy
import io
from bisect import bisect_left
from collections.abc import Callable, Collection
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
# The axis of the outputs of each weight among the operands. An LSTM has W [directions, 4H, inputs] and R [directions,
# 4H, H]: one scale for each row of each gate, which both directions share, because DequantizeLinear knows one axis.
WEIGHT_AXES = {"Conv": {1: 0}, "ConvTranspose": {1: 1}, "Gemm": {1: 1}, "MatMul": {1: -1}, "LSTM": {1: 1, 2: 1}}
LARGEST_INT8 = 127
CALIBRATION_BATCH = 32
IMAGES_PER_LAYER = 64  # that a single layer is quantized and compared on


def quantize(job: ExportJob, model: ModelProto, folder: Path) -> tuple[ModelProto, Written]:
    """Quantize a graph so that it loses no more accuracy than the job allows.

    Each method of calibration is tried on all layers; if none is good enough, the better one goes on with layers
    left in fp32.

    Args:
        job: the export, with calibration images.
        model: as `export_graph` returned it.
        folder: for temporary files.

    Raises:
        ExportRefused: if half of the layers in fp32 do not help either.
    """
    assert job.calibration is not None  # `export_model` loads them for int8
    quantizer = Quantizer(model, job.calibration, folder)
    lost: dict[str, float] = {}
    for method in CALIBRATION_METHODS:
        candidate = quantizer.quantize(quantizer.layers, method)
        lost[method] = _points_lost(job, candidate)
        job.log(f"int8, {method} ranges of {len(job.calibration)} images: {lost[method]:.2f} points of top-1 lost")
        if lost[method] <= job.settings.max_accuracy_loss + ROUNDING:
            return candidate, Written(quantizer.fp32_file, method, len(quantizer.layers))
    best = min(lost, key=lambda method: lost[method])
    left_out = _layers_to_leave(job, quantizer, best)
    kept = [name for name in quantizer.layers if name not in left_out]
    candidate = quantizer.quantize(kept, best, stored_only=left_out)
    # Most layers are harmed by the rounding of activations: then their weights can be small all the same.
    all_stored = _points_lost(job, candidate) <= job.settings.max_accuracy_loss + ROUNDING
    written = Written(quantizer.fp32_file, best, len(quantizer.layers), tuple(left_out), all_stored)
    return candidate if all_stored else quantizer.quantize(kept, best), written


def fewest(is_enough: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest number from 1 to `most` that is enough, None if `most` is not: doubled, then bisected."""
    too_few, enough = 0, 1
    while not is_enough(enough):
        if enough == most:
            return None
        too_few, enough = enough, min(2 * enough, most)
    return bisect_left(range(enough), True, lo=too_few + 1, key=is_enough)


def _layers_to_leave(job: ExportJob, quantizer: Quantizer, method: str) -> list[str]:
    layers, most = quantizer.layers, len(quantizer.layers) // 2
    job.log(f"int8 loses too much: each of {len(layers)} layers is quantized alone, to find those that it harms")
    few, expected = job.check.images[:IMAGES_PER_LAYER], job.check.logits[:IMAGES_PER_LAYER]
    errors = {}
    for name in layers:
        logits = _logits(job, quantizer.quantize([name], method), few)
        errors[name] = float(torch.nn.functional.mse_loss(logits, expected))
    ranked = sorted(layers, key=lambda name: errors[name], reverse=True)
    lost: dict[int, float] = {}

    def is_enough(number: int) -> bool:
        kept = [name for name in layers if name not in ranked[:number]]
        lost[number] = _points_lost(job, quantizer.quantize(kept, method))
        return lost[number] <= job.settings.max_accuracy_loss + ROUNDING

    number = fewest(is_enough, most) if most else None
    if number is None:
        still = f"{lost[most]:.2f} points" if most else "too much"
        raise ExportRefused(
            f"refused: int8 loses {still} of top-1 even with {most} of {len(layers)} layers in fp32, "
            f"allowed are {job.settings.max_accuracy_loss:g}: give --precision bf16, more --calibration-images, or "
            "--max-accuracy-loss."
        )
    return ranked[:number]


def _points_lost(job: ExportJob, model: ModelProto) -> float:
    return job.check.points_lost(_logits(job, model, job.check.images))


def _logits(job: ExportJob, model: ModelProto, images: torch.Tensor) -> torch.Tensor:
    return run_in_batches(
        open_session(model.SerializeToString(), job.settings.threads), images, job.settings.batch_size
    )


class Quantizer:
    """Quantizes one graph again and again, with other layers or other ranges; images are run once per method.

    Attributes:
        layers: names of the nodes that can be quantized, in the order of the graph.
        fp32_file: the graph as it was given.
    """

    def __init__(self, model: ModelProto, calibration: torch.Tensor, folder: Path) -> None:
        """Write the graph into a folder for temporary files.

        Args:
            model: as `export_graph` returned it.
            calibration: images, float32 [M, C, S, S].
            folder: for temporary files.
        """
        constant_names = constants(model).keys()
        self._model, self._calibration, self._folder = model, calibration, folder
        self._lstms = [node.name for node in model.graph.node if node.op_type == "LSTM"]
        self._static = [
            node.name
            for node in model.graph.node
            if node.op_type in STATIC_OPERATORS and node.input[1] in constant_names
        ]
        self._passing = [node.name for node in model.graph.node if node.op_type in PASSING_OPERATORS]
        self.layers = [node.name for node in model.graph.node if node.name in {*self._lstms, *self._static}]
        self.fp32_file, self._prepared = folder / "fp32.onnx", folder / "prepared.onnx"
        self.fp32_file.write_bytes(model.SerializeToString())
        quant_pre_process(self.fp32_file, self._prepared, skip_optimization=True, skip_symbolic_shape=True)

    def quantize(self, layers: Collection[str], method: str, stored_only: Collection[str] = ()) -> ModelProto:
        """Return the graph with some of its layers in int8.

        Args:
            layers: of `self.layers`; LSTMs among them are stored in int8 only, onnxruntime has no static int8 LSTM.
            method: a name of `CALIBRATION_METHODS`.
            stored_only: others, whose weights are stored in int8 and widened to fp32 for use.
        """
        static = [name for name in self._static if name in layers]
        model = self._quantize_static([*static, *self._passing], method) if static else copy.deepcopy(self._model)
        widened = {*stored_only, *(name for name in self._lstms if name in layers)}
        for node in [node for node in model.graph.node if node.name in widened]:
            _store_in_int8(model, node)
        untouched = {*self._static} - {*layers} - {*stored_only}
        for node in [node for node in model.graph.node if node.name in untouched]:
            _keep_in_fp32(model, node)
        del model.graph.value_info[:]  # shapes of inner tensors: every reader infers them
        return model

    def _quantize_static(self, nodes: list[str], method: str) -> ModelProto:
        result = self._folder / "candidate.onnx"
        with contextlib.redirect_stdout(io.StringIO()):  # the histogram collector reports its progress
            quantize_static(
                self._prepared,
                result,
                _CalibrationBatches(self._calibration),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=[*STATIC_OPERATORS, *PASSING_OPERATORS],
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                nodes_to_quantize=nodes,
                calibrate_method=CALIBRATION_METHODS[method],
                # one batch at a time: else all activations of all images are held at once
                extra_options={"CalibStridedMinMax": 1},
                calibration_cache_path=self._folder / f"{method}.json",
            )
        return onnx.load(result)


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


def _store_in_int8(model: ModelProto, node: NodeProto) -> None:
    """Store a layer's weights in int8, one scale per output, and put a DequantizeLinear behind them."""
    stored = constants(model)
    for place, axis in WEIGHT_AXES[node.op_type].items():
        name = node.input[place]
        values = numpy_helper.to_array(stored[name])
        is_transposed = any(entry.name == "transB" and entry.i for entry in node.attribute)  # as in PyTorch's Linear
        axis = 0 if is_transposed else axis % values.ndim
        shape = [-1 if number == axis else 1 for number in range(values.ndim)]
        other_axes = tuple(number for number in range(values.ndim) if number != axis)
        scale = np.abs(values).max(axis=other_axes) / LARGEST_INT8
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        integers = np.rint(values / scale.reshape(shape)).astype(np.int8)
        operands = [f"{name}_{what}" for what in ("quantized", "scale", "zero_point")]
        stored[name].CopyFrom(numpy_helper.from_array(integers, operands[0]))
        zero_points = helper.make_tensor(operands[2], TensorProto.INT8, scale.shape, bytes(len(scale)), raw=True)
        model.graph.initializer.extend([numpy_helper.from_array(scale, operands[1]), zero_points])
        widen = helper.make_node("DequantizeLinear", operands, [name], f"{name}_DequantizeLinear", axis=axis)
        model.graph.node.insert(0, widen)


def _keep_in_fp32(model: ModelProto, node: NodeProto) -> None:
    """Put an operator between a layer and the 8-bit values before it.

    onnxruntime takes a convolution with fp32 weights between 8-bit values for one that was forgotten, and quantizes its
    weights when it loads the file (WeightBiasQuantization), with one scale for all. Taking the larger of a value and
    the smallest float changes nothing, and no optimizer removes it.
    """
    before = {name: producer for producer in model.graph.node for name in producer.output}
    source = node.input[0]
    if source not in before or before[source].op_type != "DequantizeLinear":
        return
    floor, kept = f"{node.name}.floor", f"{node.name}.input"
    model.graph.initializer.append(numpy_helper.from_array(np.array(np.finfo(np.float32).min), floor))
    barrier = helper.make_node("Max", [source, floor], [kept], f"{node.name}.Max")
    model.graph.node.insert(list(model.graph.node).index(node), barrier)
    node.input[0] = kept
