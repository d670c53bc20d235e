"""The model on one machine: its size, and on a GPU how fast a rank trains it when it need not wait for data."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from models import model_spec
from models.build import rebuild_model
from planning.memory import model_sizes
from training.parallel.precision import DTYPES, resolve_precision

WARM_UP_STEPS, TIMED_STEPS = 3, 10


def model_facts(
    model_type: str, members: Sequence[str], num_classes: int, image_size: int, batch_size: int
) -> dict[str, Any]:
    """Return `parameters`, `cores`, `device` and `images_per_second` of one rank (None where there is no GPU).

    Raises:
        UserError: for an unknown model.
    """
    spec = model_spec(model_type)
    description: dict[str, Any] = {
        "model_type": model_type,
        "timm_name": spec.timm_name,
        "num_classes": num_classes,
        "image_size": image_size,
        "members": list(members) if spec.takes_members else [],
        "stem_stride_changed": {},
    }
    with torch.device("meta"):
        parameters = model_sizes(rebuild_model(description))["parameters"]
    facts: dict[str, Any] = {"parameters": parameters, "cores": len(os.sched_getaffinity(0))}
    if not torch.cuda.is_available():
        return facts | {"device": "cpu", "images_per_second": None}
    with torch.device("cuda"):
        module = rebuild_model(description)
    seconds = _gpu_step_seconds(module, batch_size, image_size)
    return facts | {"device": torch.cuda.get_device_name(), "images_per_second": batch_size / seconds}


def _gpu_step_seconds(module: torch.nn.Module, batch_size: int, image_size: int) -> float:
    """Time forward and backward on random images, in the precision of a training; the optimizer's part is small."""
    # Not is_bf16_supported: that says yes of GPUs before Ampere, too, which only emulate it.
    dtype = DTYPES[resolve_precision("auto", torch.device("cuda"))]
    images = torch.rand(batch_size, 3, image_size, image_size, device="cuda")
    for step in range(WARM_UP_STEPS + TIMED_STEPS):
        if step == WARM_UP_STEPS:
            torch.cuda.synchronize()
            start = time.perf_counter()
        with torch.autocast("cuda", dtype):
            loss = module(images).float().square().mean()
        loss.backward()
        module.zero_grad()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / TIMED_STEPS
