"""The ONNX graph of a network: exported, cleaned, named after the network's layers, told what it is."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import onnx
import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxscript import optimizer

from delivery.export.job import ExportJob
from delivery.export.sidecar import INPUT_NAME, OUTPUT_NAME, describe_use
from delivery.export.tracing import tracing
from training.errors import UserError

MAX_BYTES = 2**31 - 2**24  # a protobuf message holds 2 GiB; some of it goes to the graph
FOLD_BYTES = 2**31  # no constant is too large to be computed in advance
SCOPES = "pkg.torch.onnx.name_scopes"  # the exporter's list of the modules around a node


def export_graph(job: ExportJob) -> ModelProto:
    """Return the network as an ONNX graph, opset 20, fp32: BatchNorm folded into convolutions, batch size free.

    Raises:
        UserError: where its weights are too large for one ONNX file, or PyTorch cannot trace it.
    """
    weight_bytes = sum(tensor.nbytes for tensor in job.module.state_dict().values())
    if weight_bytes > MAX_BYTES:
        raise UserError(
            f"the weights are {weight_bytes / 1e9:.1f} GB and an ONNX file holds {MAX_BYTES / 1e9:.1f}: "
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


def describe(model: ModelProto, job: ExportJob) -> None:
    """Write what the file is, how to use it and where it came from into its metadata, as JSON texts."""
    use = describe_use(job.metadata)
    class_names = use.pop("class_names")
    facts = {"class_names": class_names, "preprocessing": use, "origin": job.origin}
    helper.set_model_props(model, {key: json.dumps(value, ensure_ascii=False) for key, value in facts.items()})
    model.producer_name = "zerovision"
    model.producer_version = ""


def constants(model: ModelProto) -> dict[str, TensorProto]:
    """Return the graph's constant tensors by name."""
    return {tensor.name: tensor for tensor in model.graph.initializer}


def store_in_bf16(model: ModelProto) -> None:
    """Store matrices and kernels in bf16, each with a Cast to fp32 behind it; vectors stay as they are."""
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


def _name_nodes(model: ModelProto) -> None:
    """Name every node after its weight or, where it has none, after the module around it; names are unique."""
    constant_names, used = constants(model).keys(), Counter[str]()
    for node in model.graph.node:
        name = _layer_name(node, constant_names)
        used[name] += 1
        node.name = name if used[name] == 1 else f"{name}#{used[name]}"  # no module has a # in its name


def _layer_name(node: NodeProto, constant_names: Any) -> str:
    for operand in node.input[1:]:
        if operand in constant_names and operand.endswith(".weight"):
            return operand.removesuffix(".weight")
    scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "")
    # a list as Python prints it: '' for the whole network, the modules, the operator
    modules = re.findall(r"'([^']*)'", scopes)[1:-1]
    return f"{modules[-1]}.{node.op_type}" if modules else node.op_type


def _strip(model: ModelProto) -> None:
    """Take out what the exporter notes about each node: stack traces with paths of this machine, and the like."""
    graph = model.graph
    for entry in (model, graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        del entry.metadata_props[:]
        if hasattr(entry, "doc_string"):
            entry.ClearField("doc_string")


def check_and_write(model: ModelProto, path: Any) -> None:
    """Write the file, and let onnx's checker look at it, shape inference included."""
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(path), full_check=True)
