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


def compile_mode(device: torch.device, batch_size_per_rank: int, zero_stage: int) -> str | None:
    """Return the mode of `torch.compile`: CUDA graphs if batches are small, else its default.

    A graph reads the weights from where they lay when it was recorded; at ZeRO 3 they lie elsewhere in each step.
    """
    are_launches_the_limit = device.type == "cuda" and batch_size_per_rank <= LARGEST_BATCH_FOR_CUDA_GRAPHS
    if are_launches_the_limit and zero_stage < 3:
        return "reduce-overhead"
    return None
