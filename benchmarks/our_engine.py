"""Our engine as a training builds it, for the benchmarks that time its steps without data and logging."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.peers.job import mean_cross_entropy
from models.whole_input import WholeInputConv2d
from training.config import TrainConfig
from training.engines.build_engine import build_engine, resolve_engine
from training.engines.deepspeed_config import deepspeed_config, read_strategy_json
from training.engines.engine import Engine, EngineSetup
from training.engines.strategies import plan_of
from training.recipe.optimizer import build_optimizer
from training.world.world import World

Step = Callable[[torch.Tensor, torch.Tensor], None]


def as_convolutions(module: nn.Module) -> nn.Module:
    """Let a network's `WholeInputConv2d` be computed as any other convolution; return the network."""
    for part in module.modules():
        if isinstance(part, WholeInputConv2d):
            part.__class__ = nn.Conv2d
    return module


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
) -> Engine:
    """Build the engine over AdamW; a collective.

    Args:
        module: the model, on any device.
        strategy: a key of `STRATEGIES`.
        precision: 'bf16', 'fp16' or 'fp32'.
        batch_size: images per rank.
        world: the ranks.
        learning_rate: AdamW's.
        weight_decay: AdamW's.
        engine: as `--engine`.
        gradient_clipping: largest norm, 0 for none.
        accumulation_steps: micro-batches of each rank in one step.
        compiles: whether the model runs through `torch.compile`.
        graphs_of: shape [C, H, W] of the images for which the model is recorded as CUDA graphs; None for no graphs.
    """
    config = TrainConfig(learning_rate=learning_rate, weight_decay=weight_decay)
    module = module.to(world.device)
    optimizer = build_optimizer(module, config, (), discriminative=False)
    strategy_json, plan = read_strategy_json(strategy), plan_of(strategy, world.size)
    json = deepspeed_config(
        strategy_json,
        batch_size_per_rank=batch_size,
        accumulation_steps=accumulation_steps,
        gradient_clipping=gradient_clipping,
        offload="none",
    )
    setup = EngineSetup(
        *(module, optimizer, plan, precision, world, batch_size),
        accumulation_steps=accumulation_steps,
        gradient_clipping=gradient_clipping,
        deepspeed_config=json,
        compiles=compiles,
        records_graphs=graphs_of is not None,
        image_shape=graphs_of,
    )
    return build_engine(setup, resolve_engine(engine, plan, strategy_json, module))


def training_step(engine: Engine, *, channels_last: bool = True) -> Step:
    """Return one step as `training.loop` takes it; by default on images in channels_last, as the loaders give them."""
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        images = images.contiguous(memory_format=layout)
        engine.backward(mean_cross_entropy(engine.forward(images), labels))
        engine.step()

    return step
