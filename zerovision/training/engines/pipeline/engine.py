"""PyTorch's engine with consecutive layers on neighboring ranks.

`torch.distributed.pipelining` schedules the micro-batches. Gradients are added along the same tree over the leaves of a
step as without a pipeline, each leaf has its own BatchNorm statistics, and the random generator's state is passed from
stage to stage with each leaf. The weights are therefore bit-identical to those of a run without a pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from zerovision.training.base.timing import SpanClock, communication
from zerovision.training.data.reader import Batch
from zerovision.training.engines.engine import EngineSetup, Loss, StepInput, StepResult, TimedEngine
from zerovision.training.engines.parameter_shards import CONVOLUTION_DIMENSIONS
from zerovision.training.engines.pipeline import Pipeline, stages_per_rank
from zerovision.training.engines.pipeline.rehearsal import boundaries_at, images_to_try, measure_pieces
from zerovision.training.engines.pipeline.stages import StagedNetwork, Trace, cuts_for, names_of_stages, places_for
from zerovision.training.engines.precision import under_autocast
from zerovision.training.engines.torch_engine import TorchEngine
from zerovision.training.world.collectives import agreed

SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def _choose_cuts(
    setup: EngineSetup, config: Any, network: nn.Module, images: torch.Tensor, traced: Trace, count: int
) -> list[str]:
    """Return the requested cuts, or the cuts that balance the stages; a collective."""
    ranks, world = config.pipeline_parallel, setup.world
    places = agreed(lambda: places_for(traced, count, ranks), world)
    seconds = measure_pieces(network, setup.module, places, images, world)
    cuts = agreed(lambda: cuts_for(traced, config.pipeline_split, lambda: seconds, count), world)
    totals = [0.0] * count
    for place, cost in zip(("", *places), seconds, strict=True):
        totals[traced.stage_at(place, cuts)] += cost
    shares, waits = [total / max(sum(totals), 1e-12) for total in totals], Pipeline(config).waits()
    setup.notes.append(
        f"pipeline of {ranks} ranks: stages begin at the input, {', '.join(cuts)}, and take "
        f"{', '.join(f'{share:.0%}' for share in shares)} of a forward; with the {config.pipeline_schedule} schedule "
        f"a rank waits {waits:.0%} of a step"
    )
    setup.events["pipeline"] = {"cuts": cuts, "stage_shares": shares, "wait_share": waits}
    return cuts


class PipelineEngine(TorchEngine):
    """A model that has one stage on this rank, or two stages in an interleaved schedule."""

    def __init__(self, setup: EngineSetup, config: Any) -> None:
        """Cut the model, release other ranks' layers, and distribute the stages; a collective.

        If the model cannot be cut as requested, raise a UserError on all ranks.
        """
        pipeline, module = setup.world.dimension("pipeline_parallel"), setup.module
        count = pipeline.size * stages_per_rank(config.pipeline_schedule)  # of stages
        own = range(pipeline.rank, count, pipeline.size)
        network, staged = under_autocast(module, setup.precision, setup.world.device), StagedNetwork(module)
        images = images_to_try(setup)
        # Give weights their final layout now: images of one channel are contiguous in either order, but their strides
        # differ.
        for parameter in module.parameters():
            if parameter.ndim == CONVOLUTION_DIMENSIONS and parameter.requires_grad:
                weight = parameter.detach()
                parameter.data = torch.empty_like(weight, memory_format=torch.channels_last).copy_(weight)
        traced = staged.traced(images.shape)
        cuts = _choose_cuts(setup, config, network, images, traced, count)
        boundaries = boundaries_at(network, module, cuts, images, setup.world)
        names = names_of_stages(traced, [name for name, _ in module.named_parameters()], cuts)
        buffers = names_of_stages(traced, [name for name, _ in module.named_buffers()], cuts)
        staged.cut(cuts, own, network, traced)
        release(module, setup.optimizer, {name for stage in own for name in (*names[stage], *buffers[stage])})
        part = dataclasses.replace(setup.part, stages=[names[stage] for stage in own], holders=pipeline)
        super().__init__(dataclasses.replace(setup, part=part))
        self.pipeline, self.count, self._own, self._staged = pipeline, count, own, staged
        self._is_last = pipeline.rank == pipeline.size - 1
        self._boundaries, self._draws = boundaries, traced.draws
        self._schedule_class = SCHEDULES[config.pipeline_schedule]
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._works: list[Any] = []  # pending sends, with their tensors

    def train(self, loss: Loss, given: StepInput, clock: SpanClock) -> StepResult:
        """Train on this rank's micro-batches of a step, all of one shape, and update the weights; a collective.

        Args:
            loss: function that computes the images' losses, called only on the last rank.
            given: the step's input.
            clock: clock that measures forward and backward; waiting for other stages is measured as communication.
        """
        self._batches, self._outputs = [*given.batches], list[torch.Tensor]()
        self._loss, self._given, self._clock = loss, given, clock
        images = self._batches[0].images
        schedule = self._schedule_for(images.shape)
        numbers = torch.arange(len(self._batches))  # in place of images and targets, which are looked up by number
        with clock.communication:
            try:
                schedule.step(
                    *([numbers] if self.pipeline.rank == 0 else []), target=numbers if self._is_last else None
                )
            except RuntimeError as error:
                raise error.__cause__ or error from None  # the error that a stage raised, such as out of memory
            self._finish_sends()
        with clock.optimizer:
            result = self._update_weights()
        # The last rank sends its losses and logits to every rank.
        size, shape = len(images), self._staged.traced(images.shape).output.shape
        rows = torch.empty(len(self._batches), size + shape.numel(), device=self._world.device)
        if self._outputs:
            torch.stack(self._outputs, out=rows)
        with communication():
            dist.broadcast(rows, group=self.pipeline.group, group_src=self.pipeline.size - 1)
        for batch, row in zip(self._batches, rows, strict=True):
            given.note(batch, row[:size], row[size:].view(shape))
        self._batches = []
        return result

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See `Engine.forward`; for evaluation only. Every rank of the pipeline returns the logits; a collective."""
        return self._received_logits(*self._start_forwards([images])[0])

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
        """See `Engine.outputs`; stages work on different batches at the same time."""
        batches, waiting = iter(batches), list[tuple[Batch, torch.Tensor, Any]]()
        while following := [*islice(batches, self.pipeline.size)]:
            started = self._start_forwards([batch.images for batch in following])
            for batch, logits, work in waiting:
                yield batch, self._received_logits(logits, work)
            waiting = [(batch, *one) for batch, one in zip(following, started, strict=True)]
        for batch, logits, work in waiting:
            yield batch, self._received_logits(logits, work)

    def _start_forwards(self, batches: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, Any]]:
        """Run this rank's stages in evaluation; return each batch's logits, and the pending work that receives them.

        Each stage processes all batches before this rank's next stage begins. The work is None on the last rank.
        """
        assert not self.module.training
        pipeline, started = self.pipeline, list[tuple[torch.Tensor, Any]]()
        for stage in self._own:
            for images in batches:
                inputs = self._received_features(stage, images) if stage else images
                result = self._staged.run(stage, inputs, images.shape)
                if stage < self.count - 1:
                    self._send_features(stage, result)
                    continue
                shared = result.cpu()  # sent over gloo; over NCCL, the next features would wait for these logits
                for rank in range(pipeline.size - 1):
                    self._send(shared, rank, pipeline.signal_group)
                started.append((result, None))
        for images in batches[len(started) :]:
            logits = torch.empty(len(images), self._staged.traced(images.shape).output.shape[1])
            started.append((logits, dist.irecv(logits, group=pipeline.signal_group, group_src=pipeline.size - 1)))
        return started

    def _received_features(self, stage: int, images: torch.Tensor) -> torch.Tensor:
        pipeline, boundary = self.pipeline, self._boundaries[stage - 1]
        features = self._staged.traced(images.shape).features[self._staged.cuts[stage - 1]]
        # The last rank sends to the first in the gloo group, because with NCCL, the two could wait for each other.
        group, tag = (pipeline.group, 0) if pipeline.rank else (pipeline.signal_group, stage)
        row = torch.empty(features.numel(), dtype=boundary.dtype, device="cpu" if tag else images.device)
        with communication():
            dist.recv(row, group=group, group_src=(pipeline.rank - 1) % pipeline.size, tag=tag)
        return boundary.evaluated.unpack(row.to(images.device), features.shape).clone()

    def _send_features(self, stage: int, features: torch.Tensor) -> None:
        row = self._boundaries[stage].evaluated.pack(features)
        if self._is_last:
            self._send(row.cpu(), 0, self.pipeline.signal_group, stage + 1)
        else:
            self._send(row, self.pipeline.rank + 1, self.pipeline.group)

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
        """Wait until at most `most` sends are pending."""
        with communication():
            while len(self._works) > most:
                self._works.pop(0)[0].wait()

    def _schedule_for(self, shape: torch.Size) -> Any:
        """Return the schedule for images of this shape; a collective over the pipeline if the shape is new."""
        if shape not in self._schedules:
            stages = [_Stage(self, number, shape) for number in self._own]
            self._schedules[shape] = self._schedule_class(
                stages if len(stages) > 1 else stages[0],
                self._accumulation_steps,
                loss_fn=self._scaled_loss,
                scale_grads=False,
            )
        return self._schedules[shape]

    def _scaled_loss(self, logits: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        batch = self._batches[int(number)]
        losses = self._loss(logits, batch)
        self._outputs.append(torch.cat([losses.detach().view(-1), logits.detach().reshape(-1)]))
        return (losses * batch.weights).sum() * self._given.loss_scale * self._factor

    def run_stage(self, stage: int, inputs: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Run a stage in training on a micro-batch's number or a received row; return the row to send or the logits."""
        if stage:
            features = self._staged.traced(shape).features[self._staged.cuts[stage - 1]]
            result = self._staged.run(stage, self._boundaries[stage - 1].receive(inputs, features.shape), shape)
        else:
            result = self._staged.run(stage, self._batches[int(inputs)].images, shape)
        if stage == self.count - 1:
            return result
        if not result.requires_grad:  # no stage up to this one is trained
            result = result.detach().requires_grad_()
        return self._boundaries[stage].send(result)

    def output_of(self, stage: int, shape: torch.Size) -> torch.Tensor:
        """Return the output of a stage without data: a row, or, for the last stage, logits."""
        traced = self._staged.traced(shape)
        if stage == self.count - 1:
            return torch.empty_like(traced.output, dtype=torch.float32, requires_grad=True)
        elements, dtype = traced.features[self._staged.cuts[stage]].numel(), self._boundaries[stage].dtype
        return torch.empty(elements, dtype=dtype, device="meta", requires_grad=True)

    @contextmanager
    def forward_of(self, stage: int, leaf: int) -> Iterator[None]:
        """Prepare for the forward pass of a leaf, and then send the random generator's state to the next stage."""
        self.buffers.select(leaf)
        # The group and the tags differ from those of the schedule's messages.
        group, tag = self.pipeline.signal_group, stage * self._accumulation_steps + leaf
        if self._draws and not stage:
            self._given.seed_leaf(leaf)
        elif self._draws:
            state = torch.empty_like(self._generator.get_state())
            dist.recv(state, group=group, group_src=(self.pipeline.rank - 1) % self.pipeline.size, tag=tag)
            self._generator.set_state(state)
        with self._clock.forward:
            yield
        if self._draws and stage < self.count - 1:
            after = (self.pipeline.rank + 1) % self.pipeline.size
            self._send(self._generator.get_state(), after, group, tag + self._accumulation_steps)

    @contextmanager
    def backward_of(self, stage: int, leaf: int) -> Iterator[None]:
        """Prepare for the backward pass of a leaf, and accumulate its gradients afterwards."""
        own = stage // self.pipeline.size
        with self._clock.backward:
            self._distribution.begin_backward(leaf, own)
            yield
            self._distribution.end_backward(own)

    @property
    def _generator(self) -> torch.Generator:
        device = self._world.device
        return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def release(module: nn.Module, optimizer: torch.optim.Optimizer, kept: Collection[str]) -> None:
    """Replace parameters and buffers whose names are not in `kept` with tensors without data."""
    empty: dict[int, torch.Tensor] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name not in kept:
            other = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            empty[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if is_parameter else other
    # A tensor may have several places.
    places = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for place, tensor in places:
        if id(tensor) in empty:
            owner, _, attribute = place.rpartition(".")
            setattr(module.get_submodule(owner), attribute, empty[id(tensor)])
    for group in optimizer.param_groups:
        group["params"] = [empty.get(id(parameter), parameter) for parameter in group["params"]]


def train_in_stages(loss: Loss, engine: TimedEngine, given: StepInput) -> StepResult:
    """Train a step whose losses the last stage computes and sends to all ranks; with a fixed loss, this is a `Step`."""
    assert isinstance(engine.engine, PipelineEngine)
    return engine.engine.train(loss, given, engine.clock)


class _Stage(PipelineStage):
    """A stage that informs the engine which leaf its forward or backward computes."""

    def __init__(self, engine: PipelineEngine, number: int, shape: torch.Size) -> None:
        self._engine = engine
        module = nn.Module()  # without parameters, because the network is not its child
        module.forward = lambda inputs: engine.run_stage(number, inputs, shape)
        super().__init__(
            module,
            number,
            engine.count,
            engine.pipeline.device,
            input_args=engine.output_of(number - 1, shape) if number else torch.zeros(1, dtype=torch.int64),
            output_args=engine.output_of(number, shape),
            group=engine.pipeline.group,
        )

    def forward_one_chunk(self, fwd_chunk_id: int, *inputs: Any, **named: Any) -> Any:
        """See `PipelineStage.forward_one_chunk`."""
        with self._engine.forward_of(self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *inputs, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *inputs: Any, **named: Any) -> None:
        """See `PipelineStage.backward_one_chunk`."""
        with self._engine.backward_of(self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *inputs, **named)
