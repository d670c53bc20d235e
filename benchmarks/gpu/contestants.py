"""The training steps that are compared on a GPU, on the same network and batch in bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.our_engine import Step, make_engine, training_step
from benchmarks.peers.job import mean_cross_entropy
from zerovision.models.build import build_model
from zerovision.training.base.settings import RunSettings
from zerovision.training.config import TrainConfig
from zerovision.training.world.world import World

OURS, PLAIN, TIMM = "ours (ddp)", "plain PyTorch loop", "timm's loop"
OURS_EAGER = "ours, no CUDA graphs"
STAGE3, DEEPSPEED = "ours (fsdp_stage3)", "ours (ddp, --engine deepspeed)"
DEEPSPEED_STAGE3 = "ours (fsdp_stage3, --engine deepspeed)"
OURS_COMPILED, TIMM_COMPILED = "ours, compiled, CUDA graphs", "timm's loop, compiled"


@dataclass(frozen=True)
class Switches:
    """Process-wide settings of PyTorch, which each contestant has its own of."""

    cudnn_benchmark: bool
    matmul_tf32: bool
    cudnn_tf32: bool

    @classmethod
    def current(cls) -> Switches:
        """Read them."""
        backends = torch.backends
        return cls(backends.cudnn.benchmark, backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32)

    def set(self) -> None:
        """Set them."""
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cuda.matmul.allow_tf32 = self.matmul_tf32
        torch.backends.cudnn.allow_tf32 = self.cudnn_tf32


@dataclass(frozen=True)
class Contestant:
    """A training step, the switches that it runs under, and what releases it."""

    step: Step
    switches: Switches
    close: Callable[[], None] = lambda: None


def make_network(model_type: str, image_size: int, num_classes: int, batch_size: int) -> nn.Module:
    """Build the network with the same weights for all."""
    torch.manual_seed(0)
    return build_model(RunSettings(model_type=model_type, batch_size=batch_size), num_classes, image_size).module


def our_contestant(
    module: nn.Module,
    world: World,
    batch_size: int,
    image_size: int,
    engine: str = "auto",
    precision: str = "bf16",
    *,
    strategy: str = "ddp",
    compiles: bool = False,
    graphs: bool = True,
) -> Contestant:
    """An engine as `zerovision.training.loop` uses it; `graphs` are CUDA's."""
    shape = (3, image_size, image_size) if graphs else None
    built = make_engine(
        module, strategy, precision, batch_size, world, engine=engine, compiles=compiles, graphs_of=shape
    )
    return Contestant(training_step(built), Switches.current(), built.close)


def plain_contestant(module: nn.Module, world: World, batch_size: int, image_size: int) -> Contestant:
    """Autocast, channels_last, fused AdamW, cuDNN's benchmark, TF32: all that a careful user writes by hand."""
    config = TrainConfig()
    module = module.to(world.device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
    )

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(world.device.type, dtype=torch.bfloat16):
            loss = mean_cross_entropy(module(images), labels)
        loss.backward()
        optimizer.step()

    return Contestant(step, Switches(cudnn_benchmark=True, matmul_tf32=True, cudnn_tf32=True))


def timm_contestant(
    module: nn.Module, world: World, batch_size: int, image_size: int, *, compiles: bool = False
) -> Contestant:
    """timm's train.py with --amp --amp-dtype bfloat16 --channels-last (and --torchcompile): its optimizer factory, its
    order of calls.
    """
    from timm.optim import create_optimizer_v2

    config = TrainConfig()
    module = module.to(world.device, memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(module, opt="adamw", lr=config.learning_rate, weight_decay=config.weight_decay)
    if compiles:
        module.compile()

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(world.device.type, dtype=torch.bfloat16):
            loss = mean_cross_entropy(module(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(step, Switches(cudnn_benchmark=True, matmul_tf32=True, cudnn_tf32=True))


MAKERS: dict[str, Callable[[nn.Module, World, int, int], Contestant]] = {
    OURS: our_contestant,
    OURS_EAGER: partial(our_contestant, graphs=False),
    STAGE3: partial(our_contestant, strategy="fsdp_stage3"),
    DEEPSPEED: partial(our_contestant, engine="deepspeed"),
    DEEPSPEED_STAGE3: partial(our_contestant, strategy="fsdp_stage3", engine="deepspeed"),
    PLAIN: plain_contestant,
    TIMM: timm_contestant,
}
COMPILED: dict[str, Callable[[nn.Module, World, int, int], Contestant]] = {
    OURS_COMPILED: partial(our_contestant, compiles=True),
    TIMM_COMPILED: partial(timm_contestant, compiles=True),
}
