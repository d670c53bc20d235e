"""The one place that changes PyTorch, DeepSpeed and the project, where values that nothing has computed lead astray.

Each change says what would go wrong without it. A name that is gone ends everything in one line that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class NameIsGoneError(Exception):
    """What a test takes hold of has another name now; the message says what to change where."""


def replace(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Put `change(what was there)` in the place of an attribute that must be there.

    Raises:
        NameIsGoneError: if it is not.
    """
    if not hasattr(owner, name):
        place = getattr(owner, "__qualname__", owner.__name__)
        raise NameIsGoneError(f"tests/gpu/pretended uses {place}.{name}, which is gone: name there what took its place")
    setattr(owner, name, change(getattr(owner, name)))


def does(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return a change to a function that does nothing and returns `value`."""
    return lambda original: lambda *arguments, **named: value


def mend_torch() -> None:
    """Keep PyTorch from garbage; for an import of modules that read `torch.bfloat16` it comes first."""
    # cuDNN's older interface has no bf16: convolutions would become matrix products image by image, not channels_last.
    # fp16 takes the same way through autocast as bf16 does on a GPU. The project's own fp16 goes by name, not by dtype.
    torch.bfloat16 = torch.float16
    # NVML, where it is, counts the machine's own GPUs.
    replace(torch.cuda, "_device_count_nvml", does(-1))
    # DDP compares the ranks' shapes, which it sends through NCCL.
    replace(dist, "_verify_params_across_processes", does(None))
    # Printing a tensor selects values by a computed mask, of a garbage size. DeepSpeed prints parameters.
    replace(nn.Parameter, "__repr__", lambda _: lambda self: f"Parameter of shape {tuple(self.shape)}")


def _read_as_true(value: Any) -> bool:
    """Read a value, and so wait for it, whatever it is."""
    bool(value)
    return True


def mend_deepspeed() -> None:
    """Keep DeepSpeed from skipping steps whose norm is garbage; the norm is still read, and waited for."""
    from deepspeed.runtime.zero import stage_1_and_2

    replace(stage_1_and_2, "is_invalid_grad_norm", lambda is_invalid: lambda norm: not _read_as_true(is_invalid(norm)))


def mend_project() -> None:
    """Keep the project from garbage."""
    import zerovision.training.epoch
    from zerovision.training.engines import compilation, engine
    from zerovision.training.steps.nonfinite_steps import NonFiniteGuard

    # Whether the gradient is finite is computed on the GPU. An engine that reads it would skip updates; one that leaves
    # it there has the run end after many "skipped" steps.
    engine.bool = _read_as_true  # in that module alone, in the place of Python's
    replace(NonFiniteGuard, "_count_skipped", does(None))
    # What a recorded network computes is compared with what it computes otherwise.
    replace(compilation, "_difference", does(None))
    # So are losses and scores: the run would "diverge", or write scores of classes that do not exist.
    replace(zerovision.training.epoch, "find_divergence", does(None))
    replace(zerovision.training.epoch, "not_finite", does(None))  # of weights, which may be whatever their memory held
    replace(zerovision.training.epoch, "write_best", does(lambda: None))
