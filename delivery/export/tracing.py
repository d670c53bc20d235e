"""What both ways of tracing a network share: silence, no gradients, and one line where it cannot be traced."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from training.errors import UserError


@contextmanager
def tracing() -> Iterator[None]:
    """Trace a network within this block.

    Raises:
        UserError: in place of whatever the tracer raises.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # PyTorch's own deprecations
        try:
            yield
        except Exception as error:  # torch.export and torch.onnx raise dozens of types with no common base
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UserError(f"PyTorch cannot trace this network: {reason}. Give --format safetensors.") from error
