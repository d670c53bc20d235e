"""Whether and how `torch.compile` compiles the model."""

from __future__ import annotations

import shutil

import torch

from training.config import TrainConfig
from training.errors import AgreedError
from training.parallel.collectives import error_on_any_rank
from training.parallel.strategies import ParallelPlan
from training.parallel.world import World

# `auto` compiles the models that were measured to be faster on CPU ranks (docs/performance.md), in runs that train on
# so many pixels in all (images x epochs x side x side): several times what pays for the compilation.
FASTER_ON_CPU = frozenset({"mobilenet", "efficientnet"})
PIXELS_THAT_PAY = 20 * 10**9
COMPILERS = ("g++", "clang++", "c++")
# Up to this a GPU is bound by kernel launches, not by arithmetic, and CUDA graphs remove the launches.
LARGEST_BATCH_FOR_CUDA_GRAPHS = 32


def resolve_compile(config: TrainConfig, saved: str | None, pixels: int, world: World) -> bool:
    """Return whether to compile, the same on all ranks; a collective.

    Compiled code computes other last bits. So 'auto' depends neither on the number of ranks nor on a clock, and a run
    that is resumed keeps its choice.

    Args:
        config: with `compile` and the model.
        saved: `compile` in the checkpoint that is resumed, None for a fresh start.
        pixels: of all images that the run trains on, each counted in every epoch.
        world: the ranks.

    Raises:
        UserError: on all ranks, if a machine has no C++ compiler; under 'auto' a fresh run is not compiled there.
    """
    wanted = config.compile == "on"
    if config.compile == "auto" and saved is not None:
        wanted = saved == "on" and not config.activation_checkpointing
    elif config.compile == "auto":
        wanted = auto_compiles(config, pixels, world.device)
    if not wanted:
        return False
    has_compiler = any(shutil.which(compiler) for compiler in COMPILERS)
    missing = f"--compile on: needs a C++ compiler ({', '.join(COMPILERS)}): install one, or use --compile off."
    error = error_on_any_rank(None if has_compiler else missing, world)
    if error and (config.compile == "on" or saved is not None):
        raise AgreedError(error)
    return not error


def auto_compiles(config: TrainConfig, pixels: int, device: torch.device) -> bool:
    """Return what 'auto' wants for a fresh run; arguments as of `resolve_compile`."""
    can_be = not (config.progressive_size or config.eval_image_size or config.activation_checkpointing)
    is_faster = device.type == "cpu" and config.model_type in FASTER_ON_CPU
    return is_faster and pixels >= PIXELS_THAT_PAY and can_be


def compile_mode(
    device: torch.device, batch_size_per_rank: int, plan: ParallelPlan, *, keeps_gradients: bool = False
) -> str | None:
    """Return the mode of `torch.compile`: CUDA graphs if batches are small, else its default.

    A graph reads the weights at the addresses of its recording, which change if the weights are released. It writes
    the gradients where those of the micro-batch before may still be, if autograd's own tensors keep their sum.

    Args:
        device: of this rank.
        batch_size_per_rank: images of a micro-batch.
        plan: whether the weights are released.
        keeps_gradients: whether autograd's tensors keep the gradients from one micro-batch to the next.
    """
    are_launches_the_limit = device.type == "cuda" and batch_size_per_rank <= LARGEST_BATCH_FOR_CUDA_GRAPHS
    if are_launches_the_limit and not plan.releases_weights and not keeps_gradients:
        return "reduce-overhead"
    return None
