"""Exports to ONNX, which onnxruntime and other serving systems run: in fp32, with weights in bf16, or in int8."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quant_pre_process,
    quantize_static,
)
from onnxscript import optimizer

from zerovision.delivery.export.export_job import ExportJob, Forward, tracing
from zerovision.delivery.export.output_folder import INPUT_NAME
from zerovision.training.base.errors import UserError
from zerovision.training.base.units import format_bytes

MAX_BYTES = 2**31 - 2**24  # a protobuf message is limited to 2 GiB, and the graph needs a part of that
FOLD_BYTES = 2**31  # fold constants of any size
ERRORS_ONLY = 3  # onnxruntime's log levels: 2 warnings, 3 errors


STATIC_OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")  # quantized if the second operand is a constant
# Operators that pass 8-bit values on unchanged; they are quantized only after a quantized layer.
PASSING_OPERATORS = ("Relu", "Clip", "MaxPool", "Reshape", "Transpose", "Flatten")
CALIBRATION_BATCH = 32


def write_onnx(job: ExportJob, path: Path) -> Path | None:
    """Write the graph in the job's precision, and return the fp32 file to compare an int8 file with, or None.

    The file is validated with onnx's own checker, including shape inference. Temporary files may remain next to `path`.
    """
    model, fp32 = export_graph(job), None
    if job.settings.precision == "bf16":
        _store_in_bf16(model)
    if job.calibration is not None:
        fp32 = path.with_name("fp32.onnx")
        fp32.write_bytes(model.SerializeToString())
        model = quantize(model, job.calibration, fp32)
    use = job.use()
    facts = {"class_names": use.pop("class_names"), "preprocessing": use, "origin": job.origin}
    helper.set_model_props(model, {key: json.dumps(value) for key, value in facts.items()})
    model.producer_name = "zerovision"
    model.producer_version = ""
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(path), full_check=True)
    return fp32


def open_onnx(path: Path, threads: int) -> Forward:
    """Open a file in onnxruntime on the CPU, with `threads` threads per operator; only its first output is returned."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def forward(images: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])

    return forward


def export_graph(job: ExportJob) -> ModelProto:
    """Return an fp32 ONNX graph, opset 20, with BatchNorm folded and a dynamic batch size, or raise a UserError."""
    weight_bytes = sum(tensor.nbytes for tensor in job.module.state_dict().values())
    if weight_bytes > MAX_BYTES:
        raise UserError(
            f"the weights take {format_bytes(weight_bytes)}, but an ONNX file can hold {format_bytes(MAX_BYTES)}: "
            "use --format safetensors or torch-export."
        )
    use = job.use()
    with tracing():
        program = torch.onnx.export(
            job.module,
            (job.example(),),
            dynamo=True,
            dynamic_shapes=job.free_sides,
            input_names=[use["input"]["name"]],
            output_names=[use[output]["name"] for output in ("output", "class") if output in use],
            verbose=False,
        )
    assert program is not None  # without a file name, the exporter returns the program
    # Nodes in the graph assemble an LSTM's weights from PyTorch's; folding turns the weights into constants again.
    model = optimizer.optimize(program.model_proto, input_size_limit=FOLD_BYTES, output_size_limit=FOLD_BYTES)
    graph = model.graph
    # Remove the exporter's notes about each node, such as stack traces with paths on this machine.
    for entry in (model, graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        del entry.metadata_props[:]
        if hasattr(entry, "doc_string"):
            entry.ClearField("doc_string")
    return model


def _store_in_bf16(model: ModelProto) -> None:
    """Store matrices and kernels in bf16, each followed by a Cast to fp32; vectors are not changed.

    Such a file runs anywhere, whereas onnxruntime's CPU kernels for convolutions do not support bf16.
    """
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) < 2:
            continue
        name, stored_name = tensor.name, f"{tensor.name}.bf16"
        content = torch.from_numpy(numpy_helper.to_array(tensor).copy()).bfloat16().view(torch.int16).numpy().tobytes()
        tensor.CopyFrom(helper.make_tensor(stored_name, TensorProto.BFLOAT16, tensor.dims, content, raw=True))
        casts.append(helper.make_node("Cast", [stored_name], [name], f"{name}.cast", to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def quantize(model: ModelProto, calibration: torch.Tensor, fp32: Path) -> ModelProto:
    """Return the graph quantized to int8 with onnxruntime's static post-training quantization.

    A real number r is stored as an 8-bit integer q, with r = scale * (q - zero_point) (equation 1 of Jacob et al. 2018,
    arXiv:1712.05877). Weights have one scale per output channel and a zero point of 0; activations have one scale and
    zero point per tensor, from their range on the calibration images, float32 [M, C, S, S]. The quantizer represents
    this by pairs of QuantizeLinear and DequantizeLinear nodes (QDQ), between which onnxruntime's kernels compute in
    integers. LSTMs stay in fp32, because onnxruntime has no static int8 kernel for LSTMs.

    `model` must also be in the file `fp32`, next to which temporary files remain.
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
        # process one batch at a time; otherwise, the activations of all images would be in memory together
        extra_options={"CalibStridedMinMax": 1},
    )
    result = onnx.load(quantized)
    del result.graph.value_info[:]  # shapes of intermediate tensors, which every reader can infer
    return result


class _CalibrationBatches(CalibrationDataReader):
    """Supplies images in batches to onnxruntime's calibration."""

    def __init__(self, images: torch.Tensor) -> None:
        self._batches = images.split(CALIBRATION_BATCH)
        self.set_range(0, len(self._batches))

    def __len__(self) -> int:
        return len(self._batches)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Restart with the batches from `start_index` to before `end_index`."""
        self._remaining = iter(self._batches[start_index:end_index])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next batch; None at the end."""
        batch = next(self._remaining, None)
        return None if batch is None else {INPUT_NAME: batch.numpy()}
