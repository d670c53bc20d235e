"""Precision: the choice of a dtype, autocast around the model, and the dynamic loss scale of fp16.

Weights, gradients, optimizer state and BatchNorm (weights and statistics) stay in fp32 at every precision; autocast
uses bf16 or fp16 for the operations that benefit. The engines' built-in precision modes would cast the weights but not
BatchNorm's buffers, or check each shard for overflow separately. Each engine therefore receives an fp32 model inside a
module that runs the model under `torch.autocast`.
"""

from __future__ import annotations

import torch
from torch import nn

from zerovision.training.base.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
AMPERE = (8, 0)


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return 'bf16', 'fp16' or 'fp32'; for 'auto', the hardware determines the precision.

    Args:
        precision: 'auto', 'bf16', 'fp16' or 'fp32'.
        device: this rank's device.

    Raises:
        UserError: for bf16 on a GPU older than Ampere, and for fp16 on a CPU, which is hundreds of times slower than
            fp32.
    """
    if precision == "fp16" and device.type == "cpu":
        raise UserError("--precision fp16 is for GPUs: on a CPU, one step may take a minute. Use bf16, fp32 or auto.")
    has_bf16 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= AMPERE
    if precision == "auto":
        return "fp32" if device.type == "cpu" else "bf16" if has_bf16 else "fp16"
    if precision == "bf16" and not has_bf16:
        raise UserError(f"--precision bf16: {torch.cuda.get_device_name(device)} lacks bf16: use fp16 or auto.")
    return precision


def note_slow_bf16(precision: str, device: torch.device) -> list[str]:
    """Return a note for bf16 on a CPU with only AVX2, where `airbench_small` takes 12 times as long as in fp32."""
    is_slow = precision == "bf16" and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    slow = "--precision bf16: without AVX-512 a CPU can take ten times as long as with --precision fp32"
    return [slow] if is_slow else []


def under_autocast(module: nn.Module, precision: str, device: torch.device) -> nn.Module:
    """Return a module that runs `module` in this precision and returns fp32; for fp32, this is `module` itself."""
    return module if precision == "fp32" else UnderAutocast(module, DTYPES[precision], device)


class UnderAutocast(nn.Module):
    """Runs a model under autocast and returns fp32; the model itself and its parameters' names do not change.

    Autocast is entered inside the engine's call, because an engine may disable an enclosing autocast on GPUs.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self._autocast = torch.autocast(device.type, dtype=dtype)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [B, classes] for images [B, C, H, W]."""
        with self._autocast:
            logits = self.module(images)
        return logits.float()


class DynamicLossScale:
    """The loss scale of fp16: halved after an overflow, doubled after many finite steps.

    The rule and its defaults are the same as in `torch.amp.GradScaler`. All ranks make the same decision, because they
    agree on whether a step was applied.
    """

    GROWTH_INTERVAL_STEPS = 2000
    MINIMUM = 1.0
    MAXIMUM = 2.0**24

    def __init__(self, initial: float = 2.0**16) -> None:
        self.value = initial
        self.good_steps = 0

    def update(self, step_applied: bool) -> None:
        """Update the scale after an optimizer step that was applied (finite gradients) or skipped."""
        if not step_applied:
            self.value = max(self.value / 2, self.MINIMUM)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps % self.GROWTH_INTERVAL_STEPS == 0:
            self.value = min(self.value * 2, self.MAXIMUM)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float]) -> None:
        """Restore the state that `state` returned."""
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
