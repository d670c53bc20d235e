"""Runs single stages of a network with the network's own forward.

Modules before the stage return tensors without data, at almost no cost. At the entry to the stage, the previous stage's
output replaces these tensors; at the entry to the next stage, the forward ends. Therefore, all code between the modules
runs exactly as the model's author wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from zerovision.models.dry_run import without_data
from zerovision.training.engines.pipeline.cuts import Trace, trace


class _Reached(BaseException):
    """Raised at the entry to the next stage; a model's `except Exception` does not catch it."""

    def __init__(self, features: torch.Tensor) -> None:
        super().__init__()
        self.features = features


class StagedNetwork:
    """Runs this rank's stages of a network, one at a time.

    Args:
        module: the whole network.

    Attributes:
        cuts: names of the modules at which all stages but the first begin.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._empty = module, without_data(module)
        self._traces: dict[tuple[int, ...], Trace] = {}
        self.cuts: list[str] = []
        self._network: nn.Module = module
        self._start, self._begin, self._end = 0, "", ""  # of the current stage
        self._traced: Trace | None = None
        self._received = torch.empty(0)
        self._hidden: dict[int, list[str]] = {}  # stage -> weights used before it, outside skipped modules

    def traced(self, shape: Sequence[int]) -> Trace:
        """Return the trace of the network for images of this shape, [B, C, H, W]."""
        key = tuple(shape)
        if key not in self._traces:
            self._traces[key] = trace(self._empty, key)
        return self._traces[key]

    def cut(self, cuts: Sequence[str], own: Iterable[int], network: nn.Module, traced: Trace) -> None:
        """Make the network run in stages from now on.

        Args:
            cuts: names of the modules at which all stages but the first begin.
            own: indices of this rank's stages.
            network: network to run: the module, or a wrapper around the module.
            traced: trace of the network for images of any shape.
        """
        self.cuts, self._network = [*cuts], network
        for name in cuts:
            module = self._module.get_submodule(name)
            module.register_forward_pre_hook(partial(self._at_cut, name), prepend=True)
        before = {stage: _before(self._start_of(stage, traced), traced) for stage in own}
        for name in {name for names in before.values() for name in names}:
            module = self._module.get_submodule(name)
            # Replace the forward, not the module: a wrapper would change the names in the state dict.
            module.forward = partial(self._skip_or_run, name, module.forward)
        for stage, names in before.items():
            skipped = tuple(f"{name}." for name in names)
            self._hidden[stage] = [
                name
                for name, first in traced.first_uses.items()
                if first < self._start_of(stage, traced) and not name.startswith(skipped)
            ]

    def run(self, stage: int, inputs: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Run a stage.

        Args:
            stage: index of the stage.
            inputs: images for the first stage, otherwise the previous stage's features.
            shape: shape of the images.

        Returns:
            The stage's features, or, for the last stage, the network's output.
        """
        self._traced = self.traced(shape)
        self._start = self._start_of(stage, self._traced)
        self._begin = self.cuts[stage - 1] if stage else ""
        self._end = self.cuts[stage] if stage < len(self.cuts) else ""
        self._received = inputs
        try:
            with self._without_data(self._hidden[stage]):
                return self._network(self._traced.images if stage else inputs)
        except _Reached as reached:
            return reached.features
        finally:
            self._received = torch.empty(0)  # only the autograd graph keeps it

    @contextmanager
    def _without_data(self, names: Iterable[str]) -> Iterator[None]:
        """Make modules before the stage run without data, even if they use weights of another stage on this rank."""
        kept: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for name in names:
            owner, _, attribute = name.rpartition(".")
            module = self._module.get_submodule(owner)
            tensors: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
            if not tensors[attribute].is_meta:
                kept.append((tensors, attribute, tensors[attribute]))
                tensors[attribute] = torch.empty_like(tensors[attribute], device="meta")
        try:
            yield
        finally:
            for tensors, attribute, tensor in kept:
                tensors[attribute] = tensor

    def _start_of(self, stage: int, traced: Trace) -> int:
        return traced.calls[self.cuts[stage - 1]].start if stage else 0

    def _at_cut(self, name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if name == self._end:
            raise _Reached(inputs[0])
        return (self._received, *inputs[1:]) if name == self._begin else None

    def _skip_or_run(self, name: str, forward: Any, *inputs: Any, **named: Any) -> Any:
        call = self._traced.calls.get(name) if self._traced is not None else None
        if call is None or call.end >= self._start:
            return forward(*inputs, **named)
        return call.output


def _before(start: int, traced: Trace) -> list[str]:
    """Return the names of the outermost modules whose calls end before this time."""
    found: list[str] = []
    for name, call in traced.calls.items():  # a module is entered before its children
        if call.end < start and not name.startswith(tuple(f"{outer}." for outer in found)):
            found.append(name)
    return found
