"""safetensors: the tensors under the network's own names, with our metadata; bf16 halves the file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError

from zerovision.delivery.export.export_job import ExportJob, Forward
from zerovision.training.checkpoint.weights import load_model, save_weights

STORED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def write(job: ExportJob, path: Path) -> None:
    """Write the file; biases and norms keep fp32, see `is_large`."""
    dtype = STORED_DTYPES[job.settings.precision]
    tensors = {
        name: tensor.to(dtype) if is_large(tensor) else tensor for name, tensor in job.module.state_dict().items()
    }
    facts = {**job.metadata, "extra": {**job.metadata["extra"], "exported": job.origin}}
    try:
        save_weights(path, tensors, **facts)
    except SafetensorError as error:  # which its writer raises in place of the system's errors
        raise OSError(str(error)) from error


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a matrix or a kernel: vectors (biases, norms) are few, and rounding them costs more."""
    return tensor.is_floating_point() and tensor.ndim > 1


def open_exported(path: Path, threads: int) -> Forward:
    """Load the file as any user of it would: into a network in fp32."""
    return load_model(path)[0]
