"""Finds where a network can be cut into stages, chooses the cuts, and runs single stages.

A cut is the entry to a module after which no earlier result is used except the module's input. Cuts are found by
running the network on tensors without data, so no model needs a table of its blocks.

Modules before the stage return tensors without data, at almost no cost. At the entry to the stage, the previous stage's
output replaces these tensors; at the entry to the next stage, the forward ends. Therefore, all code between the modules
runs exactly as the model's author wrote it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerovision.models.dry_run import without_data
from zerovision.training.base.errors import UserError
from zerovision.training.engines.activation_checkpointing import is_recomputed

MOST_NAMES = 40  # listed in a message


@dataclass(frozen=True)
class Call:
    """The only call of a module; time is counted in events: operations, and entries to and exits from modules."""

    start: int  # time of entry
    end: int  # time of exit
    operations: int  # number of operations that the network ran before the call
    output: Any  # on the meta device


@dataclass(frozen=True)
class Trace:
    """A network's execution on images of one shape, on the meta device."""

    calls: dict[str, Call]  # of the modules that are called exactly once, by name, in order of entry
    features: dict[str, torch.Tensor]  # inputs of the modules at whose entry the network can be cut, by name
    first_uses: dict[str, int]  # time of first use, by name, of the parameters and buffers that are used
    images: torch.Tensor  # [B, C, H, W]
    output: torch.Tensor
    draws: bool  # whether the network draws random numbers

    def stage_at(self, module: str, cuts: Sequence[str]) -> int:
        """Return the stage that computes a module."""
        return bisect_right([self.calls[cut].operations for cut in cuts], self.calls[module].operations)


class _Operations(TorchDispatchMode):
    """Records the span of time during which each tensor is needed, in events; see `Call`."""

    def __init__(self, weights: Iterable[torch.Tensor], images: torch.Tensor) -> None:
        super().__init__()
        self.time = self.count = 0
        self.draws = False
        self.starts: dict[int, int] = {id(images): -1}  # ID -> when a tensor was computed, or a weight first used
        self.lasts: dict[int, int] = {}
        self._weights = {id(weight) for weight in weights}
        self._alive: list[torch.Tensor] = []  # kept so that IDs stay unique

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                if id(tensor) in self._weights:
                    self.starts.setdefault(id(tensor), self.time)
                self.lasts[id(tensor)] = self.time
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self.starts.setdefault(id(tensor), self.time)
                self._alive.append(tensor)
        self.count += 1
        self.event()
        return results

    def event(self) -> int:
        """Count an event, and return the number of earlier events."""
        self.time += 1
        return self.time - 1

    def is_needed(self, tensor: torch.Tensor, start: int, end: int) -> bool:
        """Return whether a tensor was computed before `start`, and was last used between `start` and `end`."""
        first, last = self.starts.get(id(tensor), start), self.lasts.get(id(tensor), -1)
        return first < start <= last < end

    def needed(self) -> list[int]:
        """Return, for each point in time, how many tensors that were computed earlier are needed later.

        The numbers include weights that were used earlier and are used again later.
        """
        changes = [0] * (self.time + 2)
        for key, last in self.lasts.items():
            start = self.starts.get(key, last)
            if last > start:
                changes[start + 1] += 1
                changes[last + 1] -= 1
        return [*accumulate(changes)][: self.time + 1]


def trace(empty: nn.Module, shape: Sequence[int]) -> Trace:
    """Run a network without data, and find where it can be cut.

    Args:
        empty: the network from `zerovision.models.dry_run.without_data`.
        shape: the images' shape, [B, C, H, W].
    """
    images = torch.empty(tuple(shape), device="meta")
    names = {id(tensor): name for name, tensor in (*empty.named_parameters(), *empty.named_buffers())}
    operations = _Operations((*empty.parameters(), *empty.buffers()), images)
    entries: dict[str, list[tuple[int, int, Any]]] = {}
    exits: dict[str, tuple[int, Any]] = {}

    def enter(name: str, _module: nn.Module, inputs: Any) -> None:
        entries.setdefault(name, []).append((operations.event(), operations.count, inputs))

    def leave(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        exits[name] = operations.event(), output

    with ExitStack() as hooks:
        for name, child in empty.named_modules():
            hooks.enter_context(child.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(child.register_forward_hook(partial(leave, name)))
        with torch.no_grad(), operations:
            output = empty(images)
    once = {name: times[0] for name, times in entries.items() if len(times) == 1}
    calls = {name: Call(start, exits[name][0], count, exits[name][1]) for name, (start, count, _) in once.items()}
    inside = [name + "." for name, child in empty.named_modules() if is_recomputed(child)]
    needed, features = operations.needed(), dict[str, torch.Tensor]()
    for name, (_, _, inputs) in once.items():
        first = inputs[0] if inputs else None
        if not isinstance(first, torch.Tensor) or first is images or name.startswith(tuple(inside)):
            continue
        call = calls[name]
        if needed[call.start] == 1 and id(first) not in names and operations.is_needed(first, call.start, call.end):
            features[name] = first
    first_uses = {name: operations.starts[key] for key, name in names.items() if key in operations.lasts}
    return Trace(calls, features, first_uses, images, output, operations.draws)


def places_to_cut(traced: Trace) -> list[str]:
    """Return the places where the network can be cut, in order, each named after the outermost module at that place."""
    names = {traced.calls[name].operations: name for name in reversed(traced.features)}
    return [names[operations] for operations in sorted(names)]


def cuts_for(traced: Trace, split: str, costs: Callable[[], Sequence[float]], stages: int) -> list[str]:
    """Return the cuts that the user named, or the cuts that balance the stages.

    Args:
        traced: trace of the network.
        split: names of modules, separated by commas; 'auto' for balanced stages.
        costs: function that returns the costs for `balanced_cuts`, called only if the stages are to be balanced.
        stages: number of stages.

    Raises:
        UserError: if the network cannot be cut at a named module, or if the number or order of names is wrong.
    """
    places = places_to_cut(traced)
    if split == "auto":
        return balanced_cuts(places, costs(), stages)
    names = [name.strip() for name in split.split(",")]
    for name in names:
        if name not in traced.features:
            raise UserError(f"--pipeline-parallel SPLIT {name}: this model can be cut before {_listed(places)}.")
    before = [traced.calls[name].operations for name in names]
    if len(names) != stages - 1 or before != sorted({*before}):
        raise UserError(
            f"--pipeline-parallel SPLIT {split}: name the first block of every stage except the first, in order: "
            f"{stages - 1} for {stages} stages."
        )
    return names


def places_for(traced: Trace, stages: int, ranks: int) -> list[str]:
    """Return the places where the network can be cut.

    Raises:
        UserError: if the network cannot be cut into this many stages; the message names the setting with its `ranks`.
    """
    places = places_to_cut(traced)
    if not places:
        raise UserError(
            f"--pipeline-parallel {ranks}: this model cannot be cut into stages, because several tensors pass between "
            "layers: use a model such as vgg, mobilenet, efficientnet, cnn_lstm, timm's resnets, ViTs or ConvNeXts, "
            "or fsdp_stage3."
        )
    if len(places) < stages - 1:
        raise UserError(
            f"--pipeline-parallel {ranks}: {stages} stages are too many for this model, which can be cut before "
            f"{_listed(places)}: use {len(places) + 1} or fewer."
        )
    return places


def balanced_cuts(places: Sequence[str], costs: Sequence[float], stages: int) -> list[str]:
    """Return the cuts that minimize the cost of the most expensive stage, by dynamic programming.

    `costs` are those of the pieces before, between and after the places; there are at most as many stages as pieces.
    """
    sums = [0.0, *accumulate(costs)]
    pieces = len(costs)
    best: list[tuple[float, list[int]]] = [(sums[end], []) for end in range(pieces + 1)]  # for the first `end` pieces
    for stage in range(2, stages + 1):
        best = [
            min(
                ((max(best[cut][0], sums[end] - sums[cut]), [*best[cut][1], cut]) for cut in range(stage - 1, end)),
                default=(float("inf"), []),
            )
            for end in range(pieces + 1)
        ]
    return [places[cut - 1] for cut in best[pieces][1]]


def names_of_stages(traced: Trace, names: Iterable[str], cuts: Sequence[str]) -> list[list[str]]:
    """Return the names of the parameters or buffers that each stage uses; unused ones belong to the first stage."""
    starts = [traced.calls[cut].start for cut in cuts]
    dealt: list[list[str]] = [[] for _ in range(len(cuts) + 1)]
    for name in names:
        dealt[bisect_right(starts, traced.first_uses.get(name, -1))].append(name)
    return dealt


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


class _Reached(BaseException):
    """Raised at the entry to the next stage; a model's `except Exception` does not catch it."""

    def __init__(self, features: torch.Tensor) -> None:
        super().__init__()
        self.features = features


class StagedNetwork:
    """Runs this rank's stages of a network, one at a time."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.traced = cache(partial(trace, without_data(module)))  # images' shape [B, C, H, W] -> trace
        self.cuts: list[str] = []  # names of the modules at which all stages but the first begin
        self._network: nn.Module = module
        self._start, self._begin, self._end = 0, "", ""  # of the current stage
        self._calls: dict[str, Call] = {}
        self._received = torch.empty(0)
        self._hidden: dict[int, list[str]] = {}  # stage -> weights used before it, outside skipped modules

    def cut(self, cuts: Sequence[str], own: Iterable[int], network: nn.Module, traced: Trace) -> None:
        """Make `network`, the module or a wrapper around it, run in stages from now on.

        All stages but the first begin at the modules `cuts`; `own` are this rank's stages. The trace's images may have
        any shape.
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

    def run(self, stage: int, inputs: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Run a stage on images or the previous stage's features, and return its features or the network's output.

        `shape` is always that of the images.
        """
        traced = self.traced(shape)
        self._calls, self._start = traced.calls, self._start_of(stage, traced)
        self._begin = self.cuts[stage - 1] if stage else ""
        self._end = self.cuts[stage] if stage < len(self.cuts) else ""
        self._received = inputs
        try:
            with self._without_data(self._hidden[stage]):
                return self._network(traced.images if stage else inputs)
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
        call = self._calls.get(name)
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
