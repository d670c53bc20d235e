"""ONNX: the file that onnxruntime and other serving systems run, in fp32, with weights in bf16, or in int8."""

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

MAX_BYTES = 2**31 - 2**24  # a protobuf message holds 2 GiB; some of it goes to the graph
FOLD_BYTES = 2**31  # no constant is too large to be computed in advance
ERRORS_ONLY = 3  # onnxruntime's log levels: 2 warnings, 3 errors


STATIC_OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")  # with a constant as their second operand
# What passes 8-bit values on as they are; quantized only behind a layer that is.
PASSING_OPERATORS = ("Relu", "Clip", "MaxPool", "Reshape", "Transpose", "Flatten")
CALIBRATION_BATCH = 32


def write_onnx(job: ExportJob, path: Path) -> Path | None:
    """Export the graph, store it in the job's precision, and write it; other files may be left beside it.

    onnx's own checker checks the file, with shape inference.

    Returns:
        The fp32 file to compare int8 with.
    """
    model, fp32 = export_graph(job), None
    if job.settings.precision == "bf16":
        _store_in_bf16(model)
    if job.calibration is not None:
        fp32 = path.with_name("fp32.onnx")
        fp32.write_bytes(model.SerializeToString())
        model = quantize(model, job.calibration, fp32)
    _describe(model, job)
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(path), full_check=True)
    return fp32


def open_onnx(path: Path, threads: int) -> Forward:
    """Open the file in onnxruntime on the CPU, with this many threads per operator.

    If it has several outputs, the first is returned.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def forward(images: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])

    return forward


def export_graph(job: ExportJob) -> ModelProto:
    """Return the network as an ONNX graph, opset 20, fp32: BatchNorm folded into convolutions, batch size dynamic.

    Raises:
        UserError: if its weights are too large for one ONNX file, or PyTorch cannot trace it.
    """
    weight_bytes = sum(tensor.nbytes for tensor in job.module.state_dict().values())
    if weight_bytes > MAX_BYTES:
        raise UserError(
            f"the weights are {format_bytes(weight_bytes)} and an ONNX file holds {format_bytes(MAX_BYTES)}: "
            "give --format safetensors or torch-export."
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
    assert program is not None  # without a file's name the exporter returns it
    # An LSTM's weights are put together by nodes from PyTorch's own; folded, they are constants again.
    model = optimizer.optimize(program.model_proto, input_size_limit=FOLD_BYTES, output_size_limit=FOLD_BYTES)
    _strip(model)
    return model


def _describe(model: ModelProto, job: ExportJob) -> None:
    """Write class names, preprocessing and origin into the file's metadata, as JSON texts."""
    use = job.use()
    class_names = use.pop("class_names")
    facts = {"class_names": class_names, "preprocessing": use, "origin": job.origin}
    helper.set_model_props(model, {key: json.dumps(value) for key, value in facts.items()})
    model.producer_name = "zerovision"
    model.producer_version = ""


def _strip(model: ModelProto) -> None:
    """Remove the exporter's notes about each node, such as stack traces with paths of this machine."""
    graph = model.graph
    for entry in (model, graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        del entry.metadata_props[:]
        if hasattr(entry, "doc_string"):
            entry.ClearField("doc_string")


def _store_in_bf16(model: ModelProto) -> None:
    """Store matrices and kernels in bf16, each followed by a Cast to fp32; vectors stay as they are.

    onnxruntime's CPU kernels for convolutions do not support bf16; stored in bf16 and computed in fp32, the file runs
    anywhere.
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
    """Return a graph in int8: static post-training quantization by onnxruntime.

    A real number r is kept as an integer q of 8 bits, r = scale * (q - zero_point): equation 1 of Jacob et al. 2018,
    arXiv:1712.05877. Weights have one scale per output channel and zero point 0; activations one scale and zero point
    per tensor, from the range in the calibration images. The quantizer writes that as pairs of QuantizeLinear and
    DequantizeLinear nodes (QDQ), and onnxruntime's kernels compute in integers between them. LSTMs stay in fp32,
    because onnxruntime has no static int8 kernel for them.

    Args:
        model: the result of `export_graph`.
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
        """Start again, with a part of the batches."""
        self._remaining = iter(self._batches[start_index:end_index])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next batch, None at the end."""
        batch = next(self._remaining, None)
        return None if batch is None else {INPUT_NAME: batch.numpy()}
