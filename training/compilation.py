"""Whether and how `torch.compile` translates the model."""

from __future__ import annotations

import shutil

import torch

from training.errors import UserError

# Where `auto` compiles: where a table shows that it pays. On a CPU a step takes 0.90 of its time (docs/performance.md)
# after a minute or two of translation, which only a long run earns back.
FASTER_ON: frozenset[str] = frozenset()
COMPILERS = ("g++", "clang++", "c++")
# Below this the launches of kernels bound a GPU, not their arithmetic, and CUDA graphs take the launches away.
LARGEST_BATCH_FOR_CUDA_GRAPHS = 32


def resolve_compile(choice: str, device: torch.device) -> bool:
    """Say whether to compile for 'auto', 'on' or 'off'.

    Raises:
        UserError: where 'on' has no C++ compiler to work with.
    """
    if choice == "auto":
        return device.type in FASTER_ON
    if choice == "on" and not any(shutil.which(compiler) for compiler in COMPILERS):
        raise UserError(
            f"--compile on: needs a C++ compiler ({', '.join(COMPILERS)}): install one, or use --compile off."
        )
    return choice == "on"


def compile_mode(device: torch.device, batch_size_per_rank: int) -> str | None:
    """Return the mode of `torch.compile`: CUDA graphs where batches are small, else its default."""
    if device.type == "cuda" and batch_size_per_rank <= LARGEST_BATCH_FOR_CUDA_GRAPHS:
        return "reduce-overhead"
    return None
