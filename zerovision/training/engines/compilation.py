"""Decides whether to use `torch.compile`, compiles the model, and handles failures."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch import nn

from zerovision.training.base.errors import AgreedError, one_line
from zerovision.training.engines.engine import EngineSetup
from zerovision.training.engines.model_buffers import undone
from zerovision.training.engines.settings import EngineSettings
from zerovision.training.world.collectives import barrier, error_on_any_rank
from zerovision.training.world.world import World

# `auto` compiles the models that were measured to run faster on CPU ranks (docs/dev/performance.md), in runs that train
# on at least this many pixels (images x epochs x side x side), several times the number at which compilation pays off.
FASTER_ON_CPU = frozenset({"mobilenet", "efficientnet"})
PIXELS_THAT_PAY = 20 * 10**9
COMPILERS = ("g++", "clang++", "c++")


def resolve_compile(config: EngineSettings, pixels: int, world: World) -> bool:
    """Return whether to compile the model, with the same result on all ranks; a collective.

    Compilation changes the last bits of results, so 'auto' depends neither on the number of ranks nor on timings.

    Args:
        config: settings with `compile` and the model.
        pixels: number of pixels in all images that the run trains on, over all epochs.
        world: the ranks.

    Raises:
        UserError: on all ranks, if `compile` is 'on' and a machine has no C++ compiler; 'auto' then does not compile.
    """
    wanted = config.compile == "on"
    if config.compile == "auto":
        # On a GPU, CUDA graphs of the existing kernels (`engines.cuda_graphs`) already save much time without any
        # compilation, and results stay bit-identical.
        is_faster = world.device.type == "cpu" and config.model_type in FASTER_ON_CPU
        has_one_size = not (config.progressive_size or config.eval_image_size)
        wanted = is_faster and has_one_size and not config.activation_checkpointing and pixels >= PIXELS_THAT_PAY
    if not wanted:
        return False
    has_compiler = any(shutil.which(compiler) for compiler in COMPILERS)
    missing = f"--compile on needs a C++ compiler ({', '.join(COMPILERS)}): install one, or use --compile off."
    error = error_on_any_rank(None if has_compiler else missing, world)
    if error and config.compile == "on":
        raise AgreedError(error)
    return not error


def compile_network(network: nn.Module, setup: EngineSetup) -> None:
    """Compile a network in place, and run its forward and backward on all-zero images; a collective.

    If this fails, a note is added to the setup, and the network is left unchanged. CUDA graphs of compiled code are
    recorded by `engines.cuda_graphs`, not by the compiler, which would record a graph for every new shape.

    Args:
        network: network on the setup's device, with weights at their final addresses.
        setup: setup of the engine; without an `image_shape`, the network is not run.

    Raises:
        AgreedError: on all ranks, if compilation fails and `setup.compile` is 'on'.
    """
    network.compile()
    with _marked_folder(setup.data):
        error = error_on_any_rank(_rehearse(network, setup), setup.data)
    if error is None:
        return
    if setup.compile == "on":
        raise AgreedError(f"--compile on: torch.compile failed: {error}: use --compile off.")
    network._compiled_call_impl = None
    torch._dynamo.reset()
    setup.notes.extend((f"torch.compile failed: {error}", "trains without torch.compile"))


@contextlib.contextmanager
def _marked_folder(world: World) -> Iterator[None]:
    """Keep a mark in PyTorch's compile cache during the block; if a dead process left one, delete the cache first.

    This is a collective. A killed compiler may leave half a library, which can end a later process with SIGBUS.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    mark = folder / f"compiling.{socket.gethostname()}.{os.getpid()}"
    marks = folder.glob(f"compiling.{socket.gethostname()}.*")
    if world.local_rank == 0 and not all(psutil.pid_exists(int(other.suffix[1:])) for other in marks):
        shutil.rmtree(folder, ignore_errors=True)
    barrier(world)
    with contextlib.suppress(OSError):  # PyTorch itself reports that it cannot write to the folder
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def _rehearse(network: nn.Module, setup: EngineSetup) -> str | None:
    """Run a newly compiled network, and return why it failed, or None."""
    if setup.image_shape is None:
        return None
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    shape = (max(setup.batch_size, 2), *setup.image_shape)  # BatchNorm needs more than one image
    images = torch.zeros(shape, device=setup.data.device).contiguous(memory_format=torch.channels_last)
    try:
        with undone(network, setup.data.device):
            network.train()
            torch.autograd.grad(network(images).sum(), trained, allow_unused=True)  # this runs no hook of an engine
    except Exception as error:  # a compiler may raise any kind of error
        return f"{type(error).__name__}, {one_line(error)}"
    return None
