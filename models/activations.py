"""Counts the memory that a network's forward and backward passes need in addition to its weights, without data."""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# While oneDNN computes the gradient of a spatial convolution's weights, it needs two copies of the gradient, in blocks
# of channels and in the usual order, and a copy of the weights if they are not in the images' order of dimensions. The
# blocks have 16 x 16 channels, so for a layer with one input channel per group they are 256 times as large, unless a
# depthwise kernel is used; depthwise kernels exist up to 3 x 3.
BLOCKED_COPIES = 2
CHANNEL_BLOCK = 16 * 16
LARGEST_DEPTHWISE_KERNEL = 3 * 3


class Piece(NamedTuple):
    """The bytes needed to compute the part of a network between two places, for one micro-batch.

    Attributes:
        saved: number of bytes that the forward pass keeps for the backward pass.
        workspace: peak number of bytes, in either pass, in addition to the bytes that this and earlier pieces keep.
        entered: size in bytes of the tensor from the previous piece; 0 for the first piece.
    """

    saved: int
    workspace: int
    entered: int


class Activations(NamedTuple):
    """The bytes that activations and gradients need for one micro-batch.

    Attributes:
        saved: number of bytes that the forward pass keeps for the backward pass: distinct tensors, including images.
        moments: pairs of (bytes, elements) at the moments of highest use. The bytes are in addition to `saved`:
            gradients of activations, weight gradients that are being computed, and on a CPU oneDNN's copies of those
            weight gradients, minus what the backward pass has freed. The elements belong to complete weight gradients.
            A moment is left out if another moment exceeds both of its numbers.
        pieces: the bytes of each piece of the network between the requested places; one more piece than places.
    """

    saved: int
    moments: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...] = ()

    @property
    def workspace(self) -> int:
        """The number of bytes in addition to `saved` at the peak."""
        return max(taken for taken, _ in self.moments)


def activations(
    network: nn.Module,
    shape: Sequence[int],
    precision: str = "fp32",
    device: str = "cpu",
    *,
    channels_last: bool = True,
    places: Sequence[str] = (),
) -> Activations:
    """Count the memory of a forward and a backward pass without data, accumulating into existing gradients.

    Args:
        network: the result of `without_data`, which maps float32 images [B, C, H, W] to logits; activation
            checkpointing may be enabled. The network must not be used afterwards.
        shape: shape of a micro-batch of images, [B, C, H, W].
        precision: 'fp32', or 'bf16' or 'fp16' for autocast, whose copies of the weights are counted.
        device: 'cpu', or 'cuda', whose autocast normalizes in fp32.
        channels_last: whether the engine keeps convolution weights in the channels_last format.
        places: names of distinct modules, in the order in which they run; bytes are also counted between these modules.
    """
    copies = functools.partial(onednn_copies, channels_last=channels_last) if device == "cpu" else None
    lower = precision != "fp32"
    # Fake tensors have a device, by which autocast and attention choose kernels; meta tensors are twice as fast.
    fakes = lower or any(getattr(part, "fused_attn", False) for part in network.modules())
    with FakeTensorMode() if fakes else nullcontext():
        if fakes:
            _fill_with_fakes(network)
        if lower and device == "cuda":
            _normalize_in_float32(network)
        images = torch.empty(shape, device="cpu" if fakes else "meta")
        gradients = []
        live = LiveBytes(copies)
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
                gradients.append(parameter.grad)
                parameter.register_post_accumulate_grad_hook(live.complete)
        pieces = _Pieces(network, places, live, images.nbytes)
        live.ignore([images, *network.parameters(), *network.buffers(), *gradients])
        with live, warnings.catch_warnings(action="ignore"):
            # Autocast's cache keeps copies of weights until the forward pass of the network, or of a part, ends.
            with torch.autocast("cpu", dtype=DTYPES.get(precision), enabled=lower, cache_enabled=not places):
                logits = network(images)
            saved = live.now
            logits.float().sum().backward()
    moments = tuple((most - saved, done) for most, done in live.moments())
    return Activations(saved + images.nbytes, moments, pieces.found(saved))


class _Pieces:
    """Records the memory used while the forward and backward passes are between places of a network."""

    def __init__(self, network: nn.Module, places: Sequence[str], live: LiveBytes, image_bytes: int) -> None:
        self._live, self._most = live, [0] * (len(places) + 1)
        self._marks = [(-image_bytes, 0)]  # at the start of each piece: bytes in use, bytes that enter it
        for number, name in enumerate(places):
            enter = functools.partial(self._enter, number)
            network.get_submodule(name).register_forward_pre_hook(enter, prepend=True)

    def _enter(self, number: int, _module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._leave(number)
        self._marks.append((self._live.now, inputs[0].nbytes))
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self._leave(number + 1))

    def _leave(self, piece: int) -> None:
        self._most[piece] = max(self._most[piece], self._live.take_most())

    def found(self, saved: int) -> tuple[Piece, ...]:
        self._leave(0)
        both = zip(itertools.pairwise([*self._marks, (saved, 0)]), self._most, strict=True)
        return tuple(Piece(kept - before, max(most - kept, 0), size) for ((before, size), (kept, _)), most in both)


class LiveBytes(TorchDispatchMode):
    """Counts in `now` the bytes of storages that operations inside the mode create, until the storages are freed."""

    def __init__(self, copies: Callable[[Any, Any], int] | None = None) -> None:
        """Create the mode; bytes that `copies` returns for an operation and its arguments are counted while it runs."""
        super().__init__()
        self.now = self._complete = self._most_now = 0
        self._copies, self._sizes = copies, dict[int, int]()
        self._most: dict[int, int] = {}  # peak bytes by number of complete elements

    def complete(self, parameter: torch.Tensor) -> None:
        """Record that a parameter's gradient is complete."""
        self._complete += parameter.numel()

    def moments(self) -> list[tuple[int, int]]:
        """Return pairs (peak bytes, complete elements), without pairs that another pair exceeds in both numbers."""
        found: list[tuple[int, int]] = []
        for done in sorted(self._most, reverse=True):
            if not found or self._most[done] > found[-1][0]:
                found.append((self._most[done], done))
        return found

    def take_most(self) -> int:
        """Return the peak bytes since the last call."""
        most, self._most_now = self._most_now, self.now
        return most

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Ignore existing storages, which must outlive the mode."""
        self._sizes.update({tensor.untyped_storage()._cdata: 0 for tensor in tensors})

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        taken = self.now + (self._copies(operation, args) if self._copies else 0)
        self._most[self._complete] = max(self._most.get(self._complete, 0), taken)
        self._most_now = max(self._most_now, taken)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def onednn_copies(operation: Any, args: Any, *, channels_last: bool) -> int:
    """Return the bytes of oneDNN's copies of a layer's weights while it computes their gradient."""
    if operation != torch.ops.aten.convolution_backward.default:
        return 0
    _, _, weights, *_, groups, wanted = args  # [C_out, C_in / groups, height, width]
    pixels = weights[0, 0].numel()
    if not wanted[1] or pixels == 1:  # 1 x 1 is a matrix product
        return 0
    if groups > 1 and weights.shape[1] == 1 and pixels > LARGEST_DEPTHWISE_KERNEL:
        return CHANNEL_BLOCK * weights.nbytes
    return (BLOCKED_COPIES + (not channels_last)) * weights.nbytes


def _normalize_in_float32(network: nn.Module) -> None:
    """Make norm layers run in float32, as autocast does only on CUDA (https://docs.pytorch.org/docs/stable/amp.html)."""
    for part in network.modules():
        if isinstance(part, nn.LayerNorm | nn.GroupNorm):
            part.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))


def _fill_with_fakes(network: nn.Module) -> None:
    """Replace weights and buffers on the meta device with fake tensors; call this inside a `FakeTensorMode`."""
    for part in network.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            table.update({name: _fake(tensor) for name, tensor in table.items() if tensor is not None})


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
