"""Whether and how `torch.compile` compiles the model, and what happens if it cannot."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training.base.atomic_write import replacing
from training.base.errors import AgreedError, one_line
from training.engines.engine import EngineSetup
from training.engines.model_buffers import undone
from training.engines.settings import EngineSettings
from training.engines.strategies import ParallelPlan
from training.world.collectives import error_on_any_rank
from training.world.world import World

# `auto` compiles the models that were measured to be faster on CPU ranks (docs/performance.md), in runs that train on
# so many pixels in all (images x epochs x side x side): several times what pays for the compilation.
FASTER_ON_CPU = frozenset({"mobilenet", "efficientnet"})
PIXELS_THAT_PAY = 20 * 10**9
KEPT = Path("~/.cache/zerovision/compiled")
COMPILERS = ("g++", "clang++", "c++")
REHEARSALS = 3  # steps: PyTorch records a CUDA graph in the second one


def resolve_compile(config: EngineSettings, saved: str | None, pixels: int, world: World) -> bool:
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
        wanted = auto_compiles(config, pixels, world)
    if not wanted:
        return False
    has_compiler = any(shutil.which(compiler) for compiler in COMPILERS)
    missing = f"--compile on: needs a C++ compiler ({', '.join(COMPILERS)}): install one, or use --compile off."
    error = error_on_any_rank(None if has_compiler else missing, world)
    if error and (config.compile == "on" or saved is not None):
        raise AgreedError(error)
    return not error


def auto_compiles(config: EngineSettings, pixels: int, world: World) -> bool:
    """Return what 'auto' wants for a fresh run; arguments as of `resolve_compile`."""
    if config.progressive_size or config.eval_image_size or config.activation_checkpointing:
        return False
    # On a GPU, CUDA graphs gain more (`training.engines.cuda_graphs`), at once and without other bits.
    is_faster = world.device.type == "cpu" and config.model_type in FASTER_ON_CPU
    return is_faster and pixels >= PIXELS_THAT_PAY


def compile_mode(device: torch.device, plan: ParallelPlan, *, keeps_gradients: bool = False) -> str | None:
    """Return the mode of `torch.compile`: CUDA graphs where they are possible, else its default.

    A graph reads the weights at the addresses of its recording, which change if the weights are released. It writes
    the gradients where those of the micro-batch before may still be, if autograd's own tensors keep their sum.

    Args:
        device: of this rank.
        plan: whether the weights are released.
        keeps_gradients: whether autograd's tensors keep the gradients from one micro-batch to the next.
    """
    has_graphs = device.type == "cuda" and not plan.releases_weights and not keeps_gradients
    return "reduce-overhead" if has_graphs else None


def compile_network(network: nn.Module, setup: EngineSetup, *, keeps_gradients: bool = False) -> None:
    """Compile a network in place and run it, forward and backward, on images of zeros; a collective.

    What fails there (the compiler, or memory for CUDA graphs) is noted in the setup. The network is then compiled
    without graphs, or if that fails too not at all.

    Args:
        network: on the setup's device, with the weights where they stay.
        setup: with `image_shape`, without which nothing is run.
        keeps_gradients: as of `compile_mode`.

    Raises:
        AgreedError: on all ranks, if the network cannot be compiled and must be.
    """
    world, error = setup.world, None
    for mode in dict.fromkeys((compile_mode(world.device, setup.plan, keeps_gradients=keeps_gradients), None)):
        network.compile(mode=mode)
        error = error_on_any_rank(_rehearse(network, setup), world)
        if error is None:
            return
        network._compiled_call_impl = None
        torch._dynamo.reset()
        setup.notes.append(f"torch.compile{' with CUDA graphs' if mode else ''} failed: {error}")
    if setup.must_compile:
        raise AgreedError(f"--compile on: torch.compile failed: {error}: use --compile off.")
    setup.notes.append("trains without torch.compile")


def load_compiled_code(recipe: Any) -> Path | None:
    """Give PyTorch what an earlier start has compiled, and return the file for `keep_compiled_code`.

    The file has graphs and kernels of a GPU, but no machine code for CPUs, which PyTorch compiles again.

    Args:
        recipe: what the compiled code depends on; its repr is the file's name.

    Returns:
        The file, None if there is no home folder.
    """
    name = hashlib.sha256(repr((recipe, torch.__version__)).encode()).hexdigest()[:32]
    file = None
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        file = KEPT.expanduser() / name
        if file.stat().st_uid == os.getuid():  # PyTorch unpickles it
            torch.compiler.load_cache_artifacts(file.read_bytes())
    return file


def keep_compiled_code(file: Path) -> None:
    """Write what was compiled, if anything was since the last call; nothing depends on what cannot be written."""
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is not None:
        with contextlib.suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(file) as temporary:
                temporary.write_bytes(artifacts[0])


def _rehearse(network: nn.Module, setup: EngineSetup) -> str | None:
    """Run a network that has just been compiled; return why that fails, None if it does not."""
    if setup.image_shape is None:
        return None
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    shape = (max(setup.batch_size, 2), *setup.image_shape)  # BatchNorm wants more than one image
    images = torch.zeros(shape, device=setup.world.device).contiguous(memory_format=torch.channels_last)
    try:
        with undone(network, setup.world.device):
            network.train()
            for _ in range(REHEARSALS if setup.world.device.type == "cuda" else 1):
                torch.autograd.grad(network(images).sum(), trained, allow_unused=True)  # no hook of an engine runs
    except Exception as error:  # of whatever kind the compiler has
        return f"{type(error).__name__}, {one_line(error)}"
    return None
