"""PyTorch's own formats: safetensors, the tensors under their names, and torch.export, graph and tensors."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from zerovision.delivery.export.export_job import ExportJob, Forward, tracing
from zerovision.training.checkpoint.weights import load_model, save_weights

FACTS = "zerovision.json"  # beside the graph, inside a .pt2 file


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a matrix or a kernel: vectors (biases, norms) are few, and rounding them costs more."""
    return tensor.is_floating_point() and tensor.ndim > 1


def write_safetensors(job: ExportJob, path: Path) -> None:
    """Write the tensors with our metadata; in bf16 biases and norms keep fp32."""
    is_bf16, tensors = job.settings.precision == "bf16", job.module.state_dict()
    stored = {name: tensor.bfloat16() if is_bf16 and is_large(tensor) else tensor for name, tensor in tensors.items()}
    facts = {**job.metadata, "extra": {**job.metadata["extra"], "exported": job.origin}}
    try:
        save_weights(path, stored, **facts)
    except SafetensorError as error:  # which its writer raises in place of the system's errors
        raise OSError(str(error)) from error


def open_safetensors(path: Path, threads: int) -> Forward:
    """Load the file as any user of it would: into a network in fp32."""
    return load_model(path)[0]


class StoredInBf16(nn.Module):
    """A network whose large weights are stored in bf16 and widened to fp32 for use."""

    def __init__(self, module: nn.Module) -> None:
        """Take a copy of the network."""
        super().__init__()
        self.inner = copy.deepcopy(module)
        for parameter in self.inner.parameters():
            if is_large(parameter):
                parameter.data = parameter.data.bfloat16()

    def forward(self, images: torch.Tensor) -> Any:
        """Map images `[B, C, S, S]` to logits `[B, classes]`, both float32; or as of `FromPictures`."""
        widened = {name: parameter.float() for name, parameter in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, widened, (images,))


def write_torch_export(job: ExportJob, path: Path) -> None:
    """Trace the network with a free batch dimension and write it.

    Raises:
        UserError: if PyTorch cannot trace it.
    """
    module = StoredInBf16(job.module) if job.settings.precision == "bf16" else job.module
    with tracing():
        program = torch.export.export(module, (job.example(),), dynamic_shapes=job.free_sides)
    facts = {**job.use(), "origin": job.origin}
    stream = io.BytesIO()  # on a full disk a file object raises OSError, torch's own writer anything
    torch.export.save(program, stream, extra_files={FACTS: json.dumps(facts)})
    path.write_bytes(stream.getbuffer())


def open_torch_export(path: Path, threads: int) -> Forward:
    """Load the file as any user of it would; of several outputs the first is returned."""
    program = torch.export.load(path).module()

    def forward(images: torch.Tensor) -> torch.Tensor:
        outputs = program(images)
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]

    return forward
