"""The way of a tensor from the host to a GPU, on which nobody waits."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a tensor to a device; from the host to a GPU without a wait for what the GPU is at.

    A copy runs beside the host from page-locked memory alone. PyTorch hands such memory out again only once the copies
    from it are done, so the source may be dropped at once.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
