"""What tests/training/test_exchange.py runs in each rank: networks that skip a layer or a block at times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.training.engine_ranks import CLASSES, configuration, leaves_of, make_batch, make_engine, weights_of
from tests.training.no_shared_memory import without_shared_memory
from zerovision.training.engines import buckets
from zerovision.training.tasks.scores import sample_losses
from zerovision.training.world.world import World

STEPS = 2


class SkipsNet(nn.Module):
    """Repeated blocks, and a layer; what `skipped` names is left out for images with a mean below 0.

    Of 'one of two blocks', it is the first one, and for other images the second one.
    """

    def __init__(self, skipped: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.skipped = skipped
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(3))
        self.extra = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features, skips = self.stem(images), bool(images.mean() < 0)
        for number, block in enumerate(self.blocks):
            is_other = self.skipped == "one of two blocks" and number == (0 if skips else 1)
            if not is_other and not (skips and self.skipped == f"block {number}"):
                features = features + block(features)
        if not (skips and self.skipped == "layer"):
            features = features + self.extra(features)
        return self.head(features.mean((2, 3)))


def batch_of(step: int, leaf: int, uses_all: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf's batch, whose images have a mean above 0 if it uses all."""
    images, labels = make_batch(step, leaf)
    return images - images.mean() + (0.1 if uses_all else -0.1), labels


def train(world: World, skipped: str, strategy: str, used: list[bool], engine: str = "torch") -> dict[str, Any]:
    """Train two steps; return norms and weights, and those of plain PyTorch over all leaves.

    Args:
        world: the ranks.
        skipped: by the network, 'layer', 'block 0' to 'block 2', or 'one of two blocks'.
        strategy: as `--strategy`.
        used: of each micro-step of rank 0, then of rank 1, ..., whether it skips nothing.
        engine: as `--engine`.
    """
    leaves = len(used) // world.size
    changes: dict[str, Any] = {"gradient_accumulation_steps": leaves, "gradient_clipping": 0.0, "weight_decay": 0.0}
    config = configuration(engine=engine, strategy=strategy, optimizer="sgd", momentum=0.9, **changes)
    built, norms = make_engine(world, SkipsNet(skipped), config), []
    start, numbers = weights_of(built), leaves_of(built, world, leaves)
    for step in range(STEPS):
        for micro_step in range(leaves):
            uses_all = used[world.rank * leaves + micro_step]
            images, labels = batch_of(step, numbers.number(world.rank, micro_step), uses_all)
            built.backward(sample_losses(built.forward(images), labels).mean())
            result = built.step()
        assert result is not None
        norms.append(float(result.gradient_norm))
    weights = weights_of(built)
    built.close()
    of_ranks = [leaf for rank in range(world.size) for leaf in numbers.of(rank)]
    expected = plain(skipped, dict(zip(of_ranks, used, strict=True)), config.learning_rate)
    return {"start": start, "norms": norms, "weights": weights, **expected}


def train_with_late_gathers(world: World, skipped: str, used: list[bool]) -> dict[str, Any]:
    """As `train` under ddp, with buckets of a block each, whose weights come when they are waited for and no sooner.

    Returns:
        What `train` returns, and 'order': of steps and blocks as they begin, and of waits for weights.
    """
    order, gather, forward = [], dist.all_gather_into_tensor, SkipsNet.forward

    def late(output: torch.Tensor, own: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        if not async_op:
            return gather(output, own, group=group)

        def wait() -> None:
            order.append("wait")
            gather(output, own, group=group)

        return SimpleNamespace(wait=wait)

    def noting(module: SkipsNet, images: torch.Tensor) -> torch.Tensor:
        order.append("step")
        noted = [
            block.register_forward_pre_hook(lambda *_, number=number: order.append(f"block {number}"))
            for number, block in enumerate(module.blocks)
        ]
        logits = forward(module, images)
        for one in noted:
            one.remove()
        return logits

    with (
        without_shared_memory(),
        mock.patch.object(buckets, "FEWEST_ELEMENTS", 500),
        mock.patch.object(dist, "all_gather_into_tensor", late),
        mock.patch.object(SkipsNet, "forward", noting),
    ):
        report = train(world, skipped, "ddp", used)
    return {**report, "order": order}


def plain(skipped: str, used: dict[int, bool], learning_rate: float) -> dict[str, Any]:
    """Train with plain PyTorch on one rank; without a gradient a weight keeps its momentum's step, as of zeros."""
    module, norms = SkipsNet(skipped), []
    rule = torch.optim.SGD(module.parameters(), lr=learning_rate, momentum=0.9, nesterov=True)
    for step in range(STEPS):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for leaf, uses_all in used.items():
            images, labels = batch_of(step, leaf, uses_all)
            (sample_losses(module(images), labels).mean() / len(used)).backward()
        norms.append(float(torch.nn.utils.get_total_norm(parameter.grad for parameter in module.parameters())))
        rule.step()
    return {"plain_norms": norms, "plain": {name: one.detach().tolist() for name, one in module.named_parameters()}}
