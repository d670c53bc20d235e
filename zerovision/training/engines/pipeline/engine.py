"""PyTorch's engine with consecutive layers on neighbouring ranks.

`torch.distributed.pipelining` schedules the micro-batches. Gradients are added along the same tree over the leaves of a
step, each leaf has its own BatchNorm statistics, and the state of the random generator goes from stage to stage with a
leaf: the weights are the same bits as without the pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from zerovision.training.base.timing import SpanClock, communication
from zerovision.training.data.reader import Batch
from zerovision.training.engines.engine import EngineSetup, StepResult
from zerovision.training.engines.parameter_shards import CONVOLUTION_DIMENSIONS
from zerovision.training.engines.pipeline.cuts import (
    balanced_cuts,
    check_places,
    named_cuts,
    names_of_stages,
    places_to_cut,
    shares_of_stages,
)
from zerovision.training.engines.pipeline.network import StagedNetwork
from zerovision.training.engines.pipeline.rehearsal import boundaries_at, measure_pieces
from zerovision.training.engines.precision import under_autocast
from zerovision.training.engines.strategies import bubble, stages_per_rank
from zerovision.training.engines.torch_engine import TorchEngine
from zerovision.training.engines.zero1 import Stages, Zero1
from zerovision.training.world.collectives import agreed

SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
FEWEST_IMAGES = 2  # of a rehearsal: BatchNorm wants more than one

Loss = Callable[[torch.Tensor, int], torch.Tensor]
"""Returns the scalar loss of a micro-batch, given logits and its number."""


class PipelineEngine(TorchEngine):
    """A model of which this rank has one stage, or one of each round of an interleaved schedule.

    Attributes:
        pipeline: the ranks that have the stages.
        count: of the stages.
    """

    def __init__(self, setup: EngineSetup) -> None:
        """Cut the model and distribute the stages; a collective.

        Raises:
            UserError: on all ranks, if it cannot be cut so.
        """
        assert setup.pipeline is not None
        self.pipeline, self._schedule_name = setup.pipeline.world.pipeline, setup.pipeline.schedule
        self.count = self.pipeline.size * stages_per_rank(self._schedule_name)
        self._own = range(self.pipeline.rank, self.count, self.pipeline.size)
        self._images_shape = (max(setup.batch_size, FEWEST_IMAGES), *(setup.image_shape or ()))
        module, device = setup.module, setup.world.device
        network = under_autocast(module, setup.precision, device)
        self._staged = StagedNetwork(module)
        # Images and weights lie as they will: an image of one channel is contiguous in either order, but not alike.
        images = torch.empty(self._images_shape, device=device, memory_format=torch.channels_last).uniform_()
        for parameter in module.parameters():
            if parameter.ndim == CONVOLUTION_DIMENSIONS and parameter.requires_grad:
                weight = parameter.detach()
                parameter.data = torch.empty_like(weight, memory_format=torch.channels_last).copy_(weight)
        cuts = self._choose_cuts(network, module, images, setup)
        self._boundaries = boundaries_at(network, module, cuts, images, setup.pipeline.world)
        traced = self._staged.traced(self._images_shape)
        names = names_of_stages(traced, [name for name, _ in module.named_parameters()], cuts)
        buffers = names_of_stages(traced, [name for name, _ in module.named_buffers()], cuts)
        self._stages = Stages(names, self.pipeline)
        self._staged.cut(cuts, self._own, network, traced)
        release(module, setup.optimizer, {name for stage in self._own for name in (*names[stage], *buffers[stage])})
        super().__init__(setup)
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._draws, self._clock = traced.draws, SpanClock()
        self._images: Sequence[torch.Tensor] = ()
        self._loss: Loss | None = None
        self._seed_leaf: Callable[[int], None] | None = None
        self._works: list[Any] = []  # sends under way, with what they send

    def _choose_cuts(
        self, network: nn.Module, module: nn.Module, images: torch.Tensor, setup: EngineSetup
    ) -> list[str]:
        """Return the cuts that are asked for, or those that balance the stages; a collective."""
        assert setup.pipeline is not None
        traced, asked, ranks = self._staged.traced(images.shape), setup.pipeline, self.pipeline.size
        agreed(lambda: check_places(traced, self.count, f"--pipeline-parallel {ranks}"), asked.world)
        places = places_to_cut(traced)
        seconds = measure_pieces(network, module, places, images, asked.world)
        if asked.split == "auto":
            cuts = balanced_cuts(places, seconds, self.count)
        else:
            cuts = agreed(lambda: named_cuts(traced, asked.split, self.count, "--pipeline-split"), asked.world)
        shares = shares_of_stages(traced, places, seconds, cuts)
        waits = bubble(ranks, asked.schedule, setup.accumulation_steps)
        taken = ", ".join(f"{share:.0%}" for share in shares)
        setup.notes.append(
            f"pipeline of {ranks} ranks: stages begin at the input, {', '.join(cuts)}, and take {taken} of a "
            f"forward; by {asked.schedule} a rank waits for {waits:.0%} of a step"
        )
        setup.events["pipeline"] = {"cuts": cuts, "stage_shares": shares, "wait_share": waits}
        return cuts

    def _distribute(self, setup: EngineSetup) -> Zero1:
        self._parts = Zero1(setup, self._stages)
        return self._parts

    @property
    def _is_last(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    def run_schedule(
        self,
        images: Sequence[torch.Tensor],
        loss: Loss,
        seed_leaf: Callable[[int], None],
        clock: SpanClock,
    ) -> StepResult:
        """Train on this rank's micro-batches of a step, and update the weights; a collective.

        Args:
            images: [B, C, H, W] of each micro-batch; read by the first stage, all of one shape.
            loss: called on the last rank alone, once for each micro-batch, in their order.
            seed_leaf: seeds dropout for the micro-batch of a number; called on the first rank alone.
            clock: measures forward and backward; waiting for other stages counts as communication.
        """
        self._images, self._loss, self._seed_leaf, self._clock = images, loss, seed_leaf, clock
        schedule = self._schedule_for(images[0].shape)
        numbers = torch.arange(len(images))  # in place of images and targets, which are looked up by them
        with clock.communication:
            try:
                schedule.step(
                    *([numbers] if self.pipeline.rank == 0 else []), target=numbers if self._is_last else None
                )
            except RuntimeError as error:
                raise error.__cause__ or error from None  # what a stage has raised, out of memory for one
            self._finish_sends()
        self._images, self._loss = (), None
        with clock.optimizer:
            return self._update_weights()

    def share_outputs(self, outputs: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
        """Return on every rank of the pipeline what the last one has, float32 of a shape; a collective."""
        shared = torch.empty(tuple(shape), device=self._world.device) if outputs is None else outputs.contiguous()
        with communication():
            dist.broadcast(shared, group=self.pipeline.group, group_src=self.pipeline.size - 1)
        return shared

    def output_shape(self, images: torch.Tensor) -> torch.Size:
        """Return the shape of the logits of a micro-batch in training."""
        return self._staged.traced(images.shape).output.shape

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See `Engine.forward`; in evaluation alone. Every rank of the pipeline returns the logits; a collective."""
        return self._received_logits(*self._start_forward(images))

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
        """See `Engine.outputs`: stages work on different batches at the same time."""
        waiting: deque[tuple[Batch, torch.Tensor, Any]] = deque()
        for batch in batches:
            waiting.append((batch, *self._start_forward(batch.images)))
            if len(waiting) == self.pipeline.size:
                oldest, logits, work = waiting.popleft()
                yield oldest, self._received_logits(logits, work)
        for batch, logits, work in waiting:
            yield batch, self._received_logits(logits, work)

    def _start_forward(self, images: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Run this rank's stages in evaluation; return the logits, and on other ranks than the last who brings them."""
        assert not self.module.training
        pipeline, traced = self.pipeline, self._staged.traced(images.shape)
        logits = torch.empty(len(images), traced.output.shape[1])
        before, after = (pipeline.rank - 1) % pipeline.size, (pipeline.rank + 1) % pipeline.size
        for stage in self._own:
            inputs = images
            if stage:
                boundary, features = self._boundaries[stage - 1], traced.features[self._staged.cuts[stage - 1]]
                row = torch.empty(features.numel(), dtype=boundary.dtype, device=images.device)
                with communication():
                    dist.recv(row, group=pipeline.group, group_src=before)
                inputs = boundary.evaluated.unpack(row, features.shape).clone()
            result = self._staged.run(stage, inputs, images.shape)
            if stage < self.count - 1:
                self._send(self._boundaries[stage].evaluated.pack(result), after, pipeline.group)
            else:
                logits = result
        shared = logits.cpu()  # in a group of their own: NCCL would let the next features wait for these logits
        if self._is_last:
            for rank in range(pipeline.size - 1):
                self._send(shared, rank, pipeline.signal_group)
            return logits, None
        return shared, dist.irecv(shared, group=pipeline.signal_group, group_src=pipeline.size - 1)

    def _received_logits(self, logits: torch.Tensor, work: Any) -> torch.Tensor:
        if work is not None:
            with communication():
                work.wait()
        self._finish_sends(most=2 * self.pipeline.size)
        return logits.to(self._world.device)

    def _send(self, tensor: torch.Tensor, rank: int, group: Any, tag: int = 0) -> None:
        tensor = tensor.contiguous()
        self._works.append((dist.isend(tensor, group=group, group_dst=rank, tag=tag), tensor))

    def _finish_sends(self, most: int = 0) -> None:
        """Wait for sends until `most` are left."""
        with communication():
            while len(self._works) > most:
                self._works.pop(0)[0].wait()

    def _schedule_for(self, shape: torch.Size) -> Any:
        """Return the schedule for images of a shape; a collective of the pipeline when there is a new one."""
        if shape not in self._schedules:
            stages = [_Stage(self, number, shape) for number in self._own]
            schedule = SCHEDULES[self._schedule_name]
            self._schedules[shape] = schedule(
                stages if len(stages) > 1 else stages[0],
                self._accumulation_steps,
                loss_fn=self._scaled_loss,
                scale_grads=False,
            )
        return self._schedules[shape]

    def _scaled_loss(self, logits: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(logits, int(number)) * self._factor

    def run_stage(self, stage: int, inputs: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Run a stage in training, from the number of a micro-batch or the row that was received to the row to send."""
        if stage:
            features = self._staged.traced(shape).features[self._staged.cuts[stage - 1]]
            result = self._staged.run(stage, self._boundaries[stage - 1].receive(inputs, features.shape), shape)
        else:
            result = self._staged.run(stage, self._images[int(inputs)], shape)
        if stage == self.count - 1:
            return result
        if not result.requires_grad:  # nothing in the stages so far is trained
            result = result.detach().requires_grad_()
        return self._boundaries[stage].send(result)

    def output_of(self, stage: int, shape: torch.Size) -> torch.Tensor:
        """Return what a stage's module returns, without data: a row, or after the last stage logits."""
        traced = self._staged.traced(shape)
        if stage == self.count - 1:
            return torch.empty_like(traced.output, dtype=torch.float32, requires_grad=True)
        elements, dtype = traced.features[self._staged.cuts[stage]].numel(), self._boundaries[stage].dtype
        return torch.empty(elements, dtype=dtype, device="meta", requires_grad=True)

    @contextmanager
    def forward_of(self, stage: int, leaf: int) -> Iterator[None]:
        """Prepare for the forward of a leaf, and pass on the random generator's state after it."""
        self.buffers.select(leaf)
        # Of other groups and tags than the schedule's messages.
        group, tag = self.pipeline.signal_group, stage * self._accumulation_steps + leaf
        if self._draws and not stage:
            assert self._seed_leaf is not None
            self._seed_leaf(leaf)
        elif self._draws:
            state = torch.empty_like(self._generator_state())
            dist.recv(state, group=group, group_src=(self.pipeline.rank - 1) % self.pipeline.size, tag=tag)
            self._set_generator_state(state)
        with self._clock.forward:
            yield
        if self._draws and stage < self.count - 1:
            after = (self.pipeline.rank + 1) % self.pipeline.size
            self._send(self._generator_state(), after, group, tag + self._accumulation_steps)

    @contextmanager
    def backward_of(self, stage: int, leaf: int) -> Iterator[None]:
        """Add up what the backward of a leaf computes."""
        own = stage // self.pipeline.size
        with self._clock.backward:
            self._parts.begin_backward(leaf, own)
            yield
            self._parts.end_backward(own)

    def _generator_state(self) -> torch.Tensor:
        device = self._world.device
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def _set_generator_state(self, state: torch.Tensor) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.set_rng_state(state, self._world.device)
        else:
            torch.set_rng_state(state)


def release(module: nn.Module, optimizer: torch.optim.Optimizer, kept: Collection[str]) -> None:
    """Replace the parameters and buffers that are not kept by ones without data."""
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    empty: dict[int, torch.Tensor] = {}
    places = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for place, tensor in places:
        if names[id(tensor)] in kept:
            continue
        if id(tensor) not in empty:
            other = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            empty[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if is_parameter else other
        owner, _, attribute = place.rpartition(".")
        setattr(module.get_submodule(owner), attribute, empty[id(tensor)])
    for group in optimizer.param_groups:
        group["params"] = [empty.get(id(parameter), parameter) for parameter in group["params"]]


class _StageModule(nn.Module):
    """A stage as PyTorch's schedules see it. The network is no child of it: it has no parameters of its own."""

    def __init__(self, engine: PipelineEngine, number: int, shape: torch.Size) -> None:
        super().__init__()
        self._run = lambda inputs: engine.run_stage(number, inputs, shape)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the row for the next stage, or logits."""
        return self._run(inputs)


class _Stage(PipelineStage):
    """A stage whose forward and backward know of their leaf."""

    def __init__(self, engine: PipelineEngine, number: int, shape: torch.Size) -> None:
        self._engine = engine
        super().__init__(
            _StageModule(engine, number, shape),
            number,
            engine.count,
            engine.pipeline.device,
            input_args=engine.output_of(number - 1, shape) if number else torch.zeros(1, dtype=torch.int64),
            output_args=engine.output_of(number, shape),
            group=engine.pipeline.group,
        )

    def forward_one_chunk(self, fwd_chunk_id: int, *inputs: Any, **named: Any) -> Any:
        """As PyTorch's."""
        with self._engine.forward_of(self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *inputs, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *inputs: Any, **named: Any) -> None:
        """As PyTorch's."""
        with self._engine.backward_of(self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *inputs, **named)
