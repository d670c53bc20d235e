"""Our engine as a training builds it, for the benchmarks that time its steps without data and logging."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers.job import mean_cross_entropy
from zerovision.models.build import BuiltModel
from zerovision.models.weights_metadata import Description
from zerovision.training.base.timing import SpanClock
from zerovision.training.config import TrainConfig
from zerovision.training.data.reader import Batch
from zerovision.training.engines.build import build_engine, set_up_engine
from zerovision.training.engines.engine import Engine, StepInput, TimedEngine
from zerovision.training.engines.pipeline.engine import PipelineEngine, train_in_stages
from zerovision.training.loop import Accumulate
from zerovision.training.world.world import World

Step = Callable[[torch.Tensor, torch.Tensor], None]


def make_engine(
    module: nn.Module,
    strategy: str,
    precision: str,
    batch_size: int,
    world: World,
    *,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.05,
    engine: str = "auto",
    gradient_clipping: float = 0.0,
    accumulation_steps: int = 1,
    compiles: bool = False,
    graphs_of: tuple[int, int, int] | None = None,
    image_shape: tuple[int, int, int] | None = None,
) -> Engine:
    """Build the engine over AdamW; a collective.

    Args:
        module: the model, on any device.
        strategy: a key of `STRATEGIES`.
        precision: 'bf16', 'fp16' or 'fp32'.
        batch_size: images per rank of the data dimension.
        world: the ranks, maybe of a mesh.
        learning_rate: AdamW's.
        weight_decay: AdamW's.
        engine: as `--engine`.
        gradient_clipping: largest norm, 0 for none.
        accumulation_steps: micro-batches of each rank in one step.
        compiles: whether the model runs through `torch.compile`.
        graphs_of: shape [C, H, W] of the images for which the model is recorded as CUDA graphs; None for no graphs.
        image_shape: shape [C, H, W] of the images, for a network that is cut into stages.
    """
    config = TrainConfig(
        strategy=strategy,
        engine=engine,  # type: ignore[arg-type]  # one of its values
        batch_size=batch_size,
        gradient_accumulation_steps=accumulation_steps,
        gradient_clipping=gradient_clipping,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        tensor_parallel=world.dimension("tensor_parallel").size,
        pipeline_parallel=world.dimension("pipeline_parallel").size,
    )
    model = BuiltModel(module.to(world.device), Description("basic_cnn", None, 2, 8))
    setup, ways = set_up_engine(config, model, precision, world, compiles=compiles)
    images = {"static_graph": graphs_of is not None, "image_shape": graphs_of or image_shape}
    built = build_engine(dataclasses.replace(setup, **images), ways)
    for note in setup.notes:  # as that a network could not be recorded
        print(f"note: {note}", flush=True)
    return built


def training_step(engine: Engine, micro_batches: int = 1) -> Step:
    """Return one step as `training.loop` takes it, on images in channels_last, as the loaders give them."""
    losses = functools.partial(F.cross_entropy, reduction="none")

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        images = images.contiguous(memory_format=torch.channels_last)
        if micro_batches == 1:
            engine.backward(mean_cross_entropy(engine.forward(images), labels))
            engine.step()
            return
        columns = (images, labels, torch.ones(len(labels), device=labels.device), labels)
        parts = zip(*(column.chunk(micro_batches) for column in columns), strict=True)

        def loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
            return losses(logits.float(), batch.labels)

        has_stages = isinstance(engine, PipelineEngine)
        take = functools.partial(train_in_stages, loss) if has_stages else Accumulate(loss)
        given = StepInput(
            [Batch(*part) for part in parts], torch.manual_seed, micro_batches / len(labels), lambda *_: None
        )
        take(TimedEngine(engine, SpanClock()), given)

    return step
