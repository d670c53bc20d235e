"""torch.export: graph and tensors in one .pt2 file, which PyTorch runs without zerovision or timm."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerovision.delivery.export.export_job import ExportJob, Forward, tracing
from zerovision.delivery.export.safetensors_format import is_large

FACTS = "zerovision.json"  # beside the graph, inside the file


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


STORED_AS = {"fp32": lambda module: module, "bf16": StoredInBf16}


def write(job: ExportJob, path: Path) -> None:
    """Trace the network with a free batch dimension and write it.

    Raises:
        UserError: if PyTorch cannot trace it.
    """
    with tracing():
        program = torch.export.export(
            STORED_AS[job.settings.precision](job.module), (job.example(),), dynamic_shapes=job.free_sides
        )
    facts = {**job.use(), "origin": job.origin}
    stream = io.BytesIO()  # on a full disk a file object raises OSError, torch's own writer anything
    torch.export.save(program, stream, extra_files={FACTS: json.dumps(facts)})
    path.write_bytes(stream.getbuffer())


def open_exported(path: Path, threads: int) -> Forward:
    """Load the file as any user of it would; of several outputs the first is returned."""
    program = torch.export.load(path).module()

    def forward(images: torch.Tensor) -> torch.Tensor:
        outputs = program(images)
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]

    return forward
