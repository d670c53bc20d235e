"""Copies tensors to the device without waiting for it."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device; copying from the host to a GPU does not wait for the GPU's pending work.

    A copy is asynchronous only from page-locked memory. PyTorch reuses page-locked memory only after all copies from it
    are done, so the source may be released immediately.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
