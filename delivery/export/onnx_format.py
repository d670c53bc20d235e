"""ONNX: the file that onnxruntime and other serving systems run, in fp32, with weights in bf16, or in int8."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

import onnx
import onnxruntime
import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxscript import optimizer

from delivery.export.export_job import ExportJob, Forward, Written, tracing
from delivery.export.output_folder import INPUT_NAME, OUTPUT_NAME, describe_use
from training.base.errors import UserError
from training.base.units import format_bytes

MAX_BYTES = 2**31 - 2**24  # a protobuf message holds 2 GiB; some of it goes to the graph
FOLD_BYTES = 2**31  # no constant is too large to be computed in advance
SCOPES = "pkg.torch.onnx.name_scopes"  # the exporter's list of the modules around a node
ERRORS_ONLY = 3  # onnxruntime's log levels: 2 warnings, 3 errors


Stored = tuple[ModelProto, Written]


def write(job: ExportJob, path: Path) -> Written:
    """Export the graph, store it in the job's precision, and write it; other files may be left beside it.

    onnx's own checker looks at the file, shape inference included.
    """
    model, written = STORED_AS[job.settings.precision](job, export_graph(job), path.parent)
    _describe(model, job)
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(path), full_check=True)
    return written


def open_exported(path: Path, threads: int) -> Forward:
    """Open the file in onnxruntime on the CPU."""
    return open_session(path.read_bytes(), threads)


def open_session(content: bytes, threads: int) -> Forward:
    """Return the function from images to logits of an ONNX file's content.

    Args:
        content: of the file.
        threads: that share the work of one operator.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def forward(images: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run([OUTPUT_NAME], {INPUT_NAME: images.numpy()})[0])

    return forward


def export_graph(job: ExportJob) -> ModelProto:
    """Return the network as an ONNX graph, opset 20, fp32: BatchNorm folded into convolutions, batch size free.

    Raises:
        UserError: if its weights are too large for one ONNX file, or PyTorch cannot trace it.
    """
    weight_bytes = sum(tensor.nbytes for tensor in job.module.state_dict().values())
    if weight_bytes > MAX_BYTES:
        raise UserError(
            f"the weights are {format_bytes(weight_bytes)} and an ONNX file holds {format_bytes(MAX_BYTES)}: "
            "give --format safetensors or torch-export."
        )
    with tracing():
        program = torch.onnx.export(
            job.module,
            (job.example(),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            input_names=[INPUT_NAME],
            output_names=[OUTPUT_NAME],
            verbose=False,
        )
    assert program is not None  # without a file's name the exporter returns it
    # An LSTM's weights are put together by nodes from PyTorch's own; folded, they are constants again.
    model = optimizer.optimize(program.model_proto, input_size_limit=FOLD_BYTES, output_size_limit=FOLD_BYTES)
    _name_nodes(model)
    _strip(model)
    return model


def _describe(model: ModelProto, job: ExportJob) -> None:
    """Write class names, preprocessing and origin into the file's metadata, as JSON texts."""
    use = describe_use(job.metadata)
    class_names = use.pop("class_names")
    facts = {"class_names": class_names, "preprocessing": use, "origin": job.origin}
    helper.set_model_props(model, {key: json.dumps(value) for key, value in facts.items()})
    model.producer_name = "zerovision"
    model.producer_version = ""


def constants(model: ModelProto) -> dict[str, TensorProto]:
    """Return the graph's constant tensors by name."""
    return {tensor.name: tensor for tensor in model.graph.initializer}


def _name_nodes(model: ModelProto) -> None:
    """Name every node after its weight or, if it has none, after the module around it; names are unique."""
    constant_names, used = constants(model).keys(), Counter[str]()
    for node in model.graph.node:
        name = _layer_name(node, constant_names)
        used[name] += 1
        node.name = name if used[name] == 1 else f"{name}#{used[name]}"  # no module has a # in its name


def _layer_name(node: NodeProto, constant_names: Collection[str]) -> str:
    for operand in node.input[1:]:
        if operand in constant_names and operand.endswith(".weight"):
            return operand.removesuffix(".weight")
    scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "")
    # a list as Python prints it: '' for the whole network, the modules, the operator
    modules = re.findall(r"'([^']*)'", scopes)[1:-1]
    return f"{modules[-1]}.{node.op_type}" if modules else node.op_type


def _strip(model: ModelProto) -> None:
    """Remove the exporter's notes about each node, such as stack traces with paths of this machine."""
    graph = model.graph
    for entry in (model, graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        del entry.metadata_props[:]
        if hasattr(entry, "doc_string"):
            entry.ClearField("doc_string")


def _in_fp32(job: ExportJob, model: ModelProto, folder: Path) -> Stored:
    return model, Written()


def _in_bf16(job: ExportJob, model: ModelProto, folder: Path) -> Stored:
    """Store matrices and kernels in bf16, each with a Cast to fp32 behind it; vectors stay as they are.

    onnxruntime's CPU kernels for convolutions take no bf16: stored so and computed in fp32, the file runs anywhere.
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
    return model, Written()


def _in_int8(job: ExportJob, model: ModelProto, folder: Path) -> Stored:
    from delivery.export.int8 import quantize  # which builds on this module

    return quantize(job, model, folder)


STORED_AS: dict[str, Callable[[ExportJob, ModelProto, Path], Stored]] = {
    "fp32": _in_fp32,
    "bf16": _in_bf16,
    "int8": _in_int8,
}
