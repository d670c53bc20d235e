"""Fewer and faster kernels: when `torch.compile` and CUDA graphs are used, and what happens if they fail.

A CUDA graph runs the same kernels, from PyTorch or `torch.compile`, on the same numbers and in the same order as
without a graph, so results should be bit-identical; `record` checks this. Graphs save time on the host, which is most
of a small network's step on a fast GPU (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). They cost
memory, because a graph keeps all the memory that its kernels use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

import psutil
import torch
from torch import nn

from zerovision.models.ensemble import Ensemble, seed_generators
from zerovision.training.base.errors import AgreedError, one_line
from zerovision.training.engines.engine import EngineSetup
from zerovision.training.engines.model_buffers import undone
from zerovision.training.engines.precision import under_autocast
from zerovision.training.engines.settings import EngineSettings
from zerovision.training.world.collectives import barrier, error_on_any_rank
from zerovision.training.world.world import World

# `auto` compiles the models that were measured to run faster on CPU ranks (docs/dev/performance.md), in runs that train
# on at least this many pixels (images x epochs x side x side), several times the number at which compilation pays off.
FASTER_ON_CPU = frozenset({"mobilenet", "efficientnet"})
PIXELS_THAT_PAY = 20 * 10**9
COMPILERS = ("g++", "clang++", "c++")
Call = Callable[[torch.Tensor], torch.Tensor]
# If gradients have more bytes than this, several ranks use no graphs, so that they can exchange gradients during
# backward: a graph returns all gradients when it ends. Sending 64 MB takes about a millisecond at 100 GB/s. This limit
# has not been measured on several GPUs.
MOST_EXCHANGED_BYTES = 64 << 20
# Share of the GPU's memory that must stay free for the optimizer, an average of the weights, and evaluation, in
# addition to four times the size of the weights.
LEAST_FREE_SHARE = 0.1
# Relative to the gradients' norm. Kernels that add in no fixed order are off by less, and wrong gradients by more.
LARGEST_ERROR = 1e-2


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
        # On a GPU, CUDA graphs of the existing kernels (see `record`) already save much time without any
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

    The weights must be at their final addresses. Without a `setup.image_shape`, the network is not run. If compilation
    fails, all ranks raise AgreedError if `setup.compile` is 'on', and otherwise train without compilation. CUDA graphs
    of compiled code are recorded by `record`, not by the compiler, which would record a graph for every new shape.
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


class _Recording(nn.Module):
    """A network that keeps its last output in separate memory."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._network, self.output = network, torch.empty(0)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.output = self._network(images).clone()
        return self.output


class Recorded:
    """A network that replays its recording for float32 images [B, C, H, W] of the recorded shape in training.

    In evaluation, without gradients, and for images of a different shape, the original network runs instead. The
    network's parameters and buffers must stay at their addresses, and its results may depend only on images, weights,
    buffers and the GPU's random numbers. The memory of the sample `images` is kept.
    """

    def __init__(self, network: nn.Module, setup: EngineSetup, images: torch.Tensor) -> None:
        self._network, self._module, self._shape = network, setup.module, images.shape
        is_ensemble = isinstance(setup.module, Ensemble)
        self._replay = _replay_members(network, setup, images) if is_ensemble else _replay(network, images)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return the network's output in separate memory."""
        is_as_recorded = self._module.training and torch.is_grad_enabled() and images.shape == self._shape
        return self._replay(images) if is_as_recorded else self._network(images)


def _replay(network: nn.Module, images: torch.Tensor) -> Call:
    """Record a network, and return a function that replays it."""
    recording = _Recording(network)
    replay = cast(Call, torch.cuda.make_graphed_callables(recording, (images,), allow_unused_input=True))
    # The output's autograd graph would keep the nodes that accumulate gradients, on the stream of the recording.
    recording.output.detach_()
    return lambda images: replay(images).clone()


def _replay_members(network: nn.Module, setup: EngineSetup, images: torch.Tensor) -> Call:
    """Record an ensemble's members separately, because the ensemble seeds the GPU's generator between members."""
    members = [*cast(Ensemble, setup.module).members]
    replays = [_replay(under_autocast(member, setup.precision, images.device), images) for member in members]

    def replay(images: torch.Tensor) -> torch.Tensor:
        for member, one in zip(members, replays, strict=True):
            member.forward = one
        try:
            return network(images)
        finally:
            for member in members:
                del member.forward  # so that a copy of the ensemble uses its own weights

    return replay


def records(setup: EngineSetup) -> bool:
    """Return whether to record a network's forward and backward, if its weights stay in place.

    Nothing is recorded if the ranks take longer to exchange gradients than the host takes to launch kernels. Nor is a
    compiled ensemble recorded, because its members would have to be recorded separately.
    """
    if not setup.static_graph or setup.image_shape is None or setup.data.device.type != "cuda":
        return False
    has_many = setup.compiles and isinstance(setup.module, Ensemble)
    trained = sum(parameter.nbytes for parameter in setup.module.parameters() if parameter.requires_grad)
    return not has_many and (setup.data.size == 1 or trained <= MOST_EXCHANGED_BYTES)


def record(network: nn.Module, setup: EngineSetup) -> Call:
    """Return a network with recorded graphs, or the network itself, with a note, if recording fails or alters results.

    The network must be on the setup's device, with its weights at their final addresses.
    """
    assert setup.image_shape is not None
    device, recorded = setup.data.device, None
    with undone(setup.module, device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a recording's gradients are on a stream of its own
        images = torch.rand((setup.batch_size, *setup.image_shape), device=device)
        images = images.contiguous(memory_format=torch.channels_last)
        network.train()
        try:
            recorded = Recorded(network, setup, images)
            problem = _difference(network, recorded, setup, torch.rand_like(images)) or _shortage(network, device)
        except Exception as error:  # a device sync in forward, out of memory, or any other error
            problem = f"{type(error).__name__}, {one_line(error)}"
            # After a failed recording, the generator would still treat its random numbers as those of a graph.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
    if recorded is not None and problem is None:
        return recorded
    recorded = None
    torch.cuda.empty_cache()
    setup.notes.append(f"no CUDA graphs: {problem}")
    return network


def _difference(network: nn.Module, recorded: Call, setup: EngineSetup, images: torch.Tensor) -> str | None:
    """Return how logits and gradients differ from those without graphs, or None if they match.

    Random numbers drawn on the host would be the same in every replay; comparing two seeds detects this.
    """
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]

    def results(called: Call, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with undone(setup.module, images.device):
            seed_generators(seed, images.device)
            logits = called(images)
            weights = torch.linspace(-1, 1, logits.numel(), device=images.device).view_as(logits)
            gradients = torch.autograd.grad(logits, trained, weights, allow_unused=True)
        return logits.detach(), [gradient for gradient in gradients if gradient is not None]

    for seed in (1, 2):
        (logits, gradients), (expected, exact) = results(recorded, seed), results(network, seed)
        if len(gradients) != len(exact) or not torch.equal(logits, expected):
            return f"replayed, logits are off by up to {float((logits - expected).abs().max()):.2g}"
        off, norm = (_norm(torch._foreach_sub(gradients, exact)), _norm(exact))
        if not off <= LARGEST_ERROR * norm:
            return f"replayed, gradients are off by {off:.2g}, at a norm of {norm:.2g}"
    return None


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm([*tensors]))))


def _shortage(network: nn.Module, device: torch.device) -> str | None:
    """Return a note if the graphs leave too little GPU memory, otherwise None."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    weights = sum(parameter.nbytes for parameter in network.parameters())
    is_enough = free >= LEAST_FREE_SHARE * total + 4 * weights
    return None if is_enough else f"they would leave {free / 1e9:.1f} of {total / 1e9:.1f} GB of the GPU's memory"
