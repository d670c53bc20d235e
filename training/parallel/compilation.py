"""Whether and how `torch.compile` compiles the model."""

from __future__ import annotations

import shutil

import torch

from training.errors import UserError
from training.parallel.strategies import ParallelPlan

# Devices on which `auto` compiles: those for which a measurement shows that it pays. On a CPU a step takes 0.90 of its
# time (docs/performance.md) after one or two minutes of compilation, which pays only in a long run.
FASTER_ON: frozenset[str] = frozenset()
COMPILERS = ("g++", "clang++", "c++")
# Up to this a GPU is bound by kernel launches, not by arithmetic, and CUDA graphs remove the launches.
LARGEST_BATCH_FOR_CUDA_GRAPHS = 32


def resolve_compile(choice: str, device: torch.device) -> bool:
    """Return whether to compile for 'auto', 'on' or 'off'.

    Raises:
        UserError: for 'on' without a C++ compiler.
    """
    if choice == "auto":
        return device.type in FASTER_ON
    if choice == "on" and not any(shutil.which(compiler) for compiler in COMPILERS):
        raise UserError(
            f"--compile on: needs a C++ compiler ({', '.join(COMPILERS)}): install one, or use --compile off."
        )
    return choice == "on"


def compile_mode(device: torch.device, batch_size_per_rank: int, plan: ParallelPlan) -> str | None:
    """Return the mode of `torch.compile`: CUDA graphs if batches are small, else its default.

    A graph reads the weights at the addresses of its recording, which change if the weights are released.
    """
    are_launches_the_limit = device.type == "cuda" and batch_size_per_rank <= LARGEST_BATCH_FOR_CUDA_GRAPHS
    if are_launches_the_limit and not plan.releases_weights:
        return "reduce-overhead"
    return None
