"""The interfaces of engines and steps, and an engine's setup.

An engine is a model with its optimizer, distributed over the ranks. Only the engines' own modules depend on which
engine is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from zerovision.training.base.leaves import Leaves
from zerovision.training.base.timing import SpanClock
from zerovision.training.data.reader import Batch
from zerovision.training.engines.model_buffers import ModelBuffers
from zerovision.training.engines.parameter_shards import WHOLE, EngineState, ModelPart, TakeBox
from zerovision.training.engines.precision import DynamicLossScale
from zerovision.training.engines.ways import ParallelPlan
from zerovision.training.world.world import World


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step.

    Attributes:
        applied: whether the weights were updated, which requires a finite gradient; a bool, or a bool tensor [] on the
            device, which causes a sync when it is read.
        gradient_norm: global L2 norm of the gradient before clipping; None if it was not computed.
    """

    applied: bool | torch.Tensor
    gradient_norm: float | torch.Tensor | None


class Updates:
    """Decides whether to apply each update of an engine, counts the updates, and scales the gradients.

    `clipping` is the largest global L2 norm of the gradient, or 0 for none. `device` is that of the weights that the
    optimizer updates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, precision: str, clipping: float, device: torch.device) -> None:
        self._optimizer, self._clipping = optimizer, clipping
        self.loss_scale = DynamicLossScale() if precision == "fp16" else None
        self.applied: int | torch.Tensor = 0  # number of applied updates; as a tensor, int [] on the device
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        # Fused rules skip updates themselves (by their attribute `found_inf` on the device), so that the host does not
        # wait for the device; but the loss scale of fp16 needs each decision immediately.
        self.defers_verdict = device.type == "cuda" and is_fused and self.loss_scale is None

    @property
    def scale(self) -> float:
        """The factor by which losses are multiplied, and thus gradients, until `factor` cancels it."""
        return self.loss_scale.value if self.loss_scale is not None else 1.0

    def factor(self, norm: torch.Tensor) -> torch.Tensor | None:
        """Return the factor that undoes the loss scale and clips the gradients, float64 [], or None for a factor of 1.

        `norm`, float64 [], is the global L2 norm of the gradient without the loss scale.
        """
        if not self._clipping and self.scale == 1.0:
            return None
        clipping = (self._clipping / (norm + 1e-6)).clamp(max=1.0) if self._clipping else torch.ones_like(norm)
        return (clipping / self.scale).nan_to_num(nan=0.0)  # if the step is skipped: zero gradients stay zero

    def apply(self, norm: torch.Tensor, update: Callable[[], None]) -> StepResult:
        """Call `update` if the gradient is finite, count the update if it is applied, and adapt the loss scale.

        If the decision is deferred, `update` is always called, and the optimizer's rule skips a non-finite update.
        """
        is_finite = norm.isfinite()
        applied: bool | torch.Tensor = is_finite
        if self.defers_verdict:
            self._optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
        else:
            applied = bool(is_finite)  # a sync on a GPU
        if applied is not False:
            update()
        self.applied += applied
        if self.loss_scale is not None:
            self.loss_scale.update(bool(applied))
        return StepResult(applied, norm)


@dataclass(frozen=True)
class EngineSetup:
    """The setup that every engine is built from.

    Attributes:
        module: the model in fp32, float32 images [B, C, H, W] -> logits [B, classes].
        optimizer: the optimizer over the module's parameters, which the engine may replace.
        plan: how the state is distributed.
        precision: 'bf16', 'fp16' or 'fp32'.
        world: the ranks; `world.data` contains the ranks that read different images.
        batch_size: number of images in a micro-batch.
        accumulation_steps: number of micro-batches per rank in one optimizer step.
        gradient_clipping: largest global L2 norm of the gradient; 0 for none.
        compile: 'on' to run the model through `torch.compile`, 'auto' to do so unless that fails, or 'off'.
        static_graph: whether forward and backward run the same kernels in every step, which CUDA graphs require.
        image_shape: shape [C, H, W] of images to try compilation and graphs with; None for no trial and no graphs.
        notes: lines for the log; the engine adds more.
        events: events for metrics.jsonl, kind -> values; the engine adds more.
        part: the part of the model that the module contains.
        groups: number of equal groups of ranks that train independently.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    plan: ParallelPlan
    precision: str
    world: World
    batch_size: int
    accumulation_steps: int = 1
    gradient_clipping: float = 0.0
    compile: Literal["off", "auto", "on"] = "off"
    static_graph: bool = False
    image_shape: tuple[int, int, int] | None = None
    notes: list[str] = field(default_factory=list)
    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    part: ModelPart = WHOLE
    groups: int = 1

    @property
    def compiles(self) -> bool:
        """Whether the model runs through `torch.compile`."""
        return self.compile != "off"

    @property
    def leaves(self) -> Leaves:
        """The leaves of a step."""
        return Leaves(self.data.size, self.accumulation_steps, self.plan.gradient_shards)

    @property
    def data(self) -> World:
        """The ranks that read different images."""
        return self.world.data


class Engine(Protocol):
    """A distributed model with its optimizer, which all ranks together build from an `EngineSetup`.

    Attributes:
        module: the model; at ZeRO 2 and 3 its parameters may be empty or sharded between steps.
        optimizer: the optimizer; the 'lr' of its groups is set before each step.
        buffers: the module's buffers, in all of this rank's versions.
        loss_scale: loss scale for fp16, otherwise None.
        group: what messages call the groups of ranks that each decide whether to apply an update; '' if all ranks
            decide together.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    buffers: ModelBuffers
    loss_scale: DynamicLossScale | None
    group: str = ""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the module's output for images [B, C, H, W], in float32; a collective at ZeRO 2 and 3."""

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
        """In evaluation, yield each batch with the output of `forward` for its images.

        This is a collective if `forward` is a collective.
        """
        for batch in batches:
            yield batch, self.forward(batch.images)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a scalar loss; a collective, because an engine may reduce it here."""

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradients that `backward` would add to the sums, by parameter name; only PyTorch's engine."""
        raise TypeError(type(self))

    def drop_leaf(self) -> None:
        """Discard the first leaf of a step, between `backward` and `step`; only PyTorch's `ddp`; a collective."""
        raise TypeError(type(self))

    def step(self) -> StepResult | None:
        """Count a micro-step, and update the weights after the last micro-step of an accumulation; a collective.

        Returns:
            The result of an update, or None between updates. All ranks skip an update if the gradient's norm is not
            finite.
        """

    def restart_optimizer(self) -> None:
        """Reset the optimizer's moments and step counts, but keep averages of the weights."""

    def change_weights(self, change: Callable[[torch.Tensor, dict[str, torch.Tensor]], None]) -> None:
        """Let `change` modify this rank's part of the trained weights, then update the model; a collective.

        Args:
            change: function called with each tensor that the optimizer updates and a dictionary of its optimizer state.
        """

    def state(self) -> EngineState:
        """Return this rank's part of the training state as live tensors.

        This is not a collective, but it may wait for a GPU.
        """

    def wait_before_change(self, copied: torch.cuda.Event) -> None:
        """Make the GPU, but not the host, wait until the state's shards are copied before changing them."""
        copied.wait()

    def load_state(
        self, tensors: Mapping[str, TakeBox], buffers: Mapping[str, torch.Tensor], applied_steps: int
    ) -> None:
        """Load a state that any engine saved under any strategy; a collective.

        Args:
            tensors: kind (see `ParameterShard`) -> function that returns a box of a whole parameter's tensor; each rank
                calls it for the boxes that it needs. Tensors of missing kinds keep their values.
            buffers: name -> this rank's buffers [n, ...]; see `EngineState`.
            applied_steps: number of updates that have been applied.
        """

    def close(self) -> None:
        """Release hooks and buffers."""


class TimedEngine:
    """Wraps an engine, and measures its forward, backward and optimizer step with a clock."""

    def __init__(self, engine: Engine, clock: SpanClock) -> None:
        self.engine, self.clock = engine, clock
        self.optimizer, self.buffers = engine.optimizer, engine.buffers

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See `Engine.forward`."""
        with self.clock.forward:
            return self.engine.forward(images)

    def backward(self, loss: torch.Tensor) -> None:
        """See `Engine.backward`."""
        with self.clock.backward:
            self.engine.backward(loss)

    def step(self) -> StepResult | None:
        """See `Engine.step`."""
        with self.clock.optimizer:
            return self.engine.step()


Loss = Callable[[torch.Tensor, Batch], torch.Tensor]
"""Maps logits, [B, C] or [B, C, members] for an ensemble, and the logits' batch to losses, float32 [B]."""

Note = Callable[..., None]
"""Receives the results of a micro-batch: the batch, losses [B], logits [B, classes] and, unless the losses themselves
show which samples are bad, values [B] that are not finite for bad samples.
"""


class StepInput(NamedTuple):
    """This rank's input to an optimizer step.

    Attributes:
        batches: this rank's micro-batches, on its device.
        seed_leaf: function that seeds dropout for a micro-batch, given the micro-batch's index.
        loss_scale: factor by which losses are multiplied; see `BatchPlan.loss_scale_for`.
        note: function that is called with the results of each micro-batch.
    """

    batches: Iterable[Batch]
    seed_leaf: Callable[[int], None]
    loss_scale: float
    note: Note


Step = Callable[[TimedEngine, StepInput], StepResult | None]
"""Trains the model on this rank's part of a step, and returns the engine's result; a collective."""


class Averages(Protocol):
    """Weights that are evaluated instead of the trained weights."""

    def after_step(self, applied: bool | torch.Tensor, step: int) -> None:
        """Update the averages; a collective.

        Args:
            applied: whether the step changed the weights; may be a bool tensor [] on the weights' device.
            step: number of the step in the run, from 1, including skipped steps.
        """

    def in_use(self) -> AbstractContextManager[None]:
        """Make the model use the averages inside the block; a collective at the start and the end of the block.

        After the block, the weights are bit-identical to those before the block. After an error, the weights are not
        restored, because other ranks may not have failed.
        """

    def describe(self) -> list[str]:
        """Return lines for the log."""
        return []
