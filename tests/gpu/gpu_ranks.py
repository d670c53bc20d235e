"""What the GPU tests run inside a rank: our engine beside a plain PyTorch loop on the CPU, the oracle."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from benchmarks.our_engine import make_engine
from models import MODELS, build_model
from training.distributed import World
from training.engine import Engine
from training.metrics import sample_losses

CLASSES, IMAGE_SIZE, BATCH_SIZE, LEARNING_RATE = 5, 64, 8, 1e-3


def make_network(model_type: str) -> nn.Module:
    """The same weights every time, no dropout: its draws differ between devices."""
    torch.manual_seed(0)
    module = build_model(model_type, num_classes=CLASSES, image_size=IMAGE_SIZE).module
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, nn.RNNBase):
            part.dropout = 0.0
    return module


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return images, torch.arange(BATCH_SIZE) % CLASSES


def our_engine(module: nn.Module, strategy: str, engine: str, precision: str, world: World) -> Engine:
    recipe = {"learning_rate": LEARNING_RATE, "weight_decay": 0.0}
    return make_engine(module, strategy, precision, BATCH_SIZE, world, engine=engine, **recipe)


def our_losses(engine: Engine, steps: int, world: World) -> list[float]:
    images, labels = (tensor.to(world.device) for tensor in make_batch())
    images = images.contiguous(memory_format=torch.channels_last)
    losses = []
    for _ in range(steps):
        loss = sample_losses(engine.forward(images), labels).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def plain_losses(module: nn.Module, steps: int) -> list[float]:
    """A plain loop on the CPU in fp32."""
    images, labels = make_batch()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def losses_beside_plain(world: World, model_type: str, strategy: str, engine: str, steps: int) -> dict[str, Any]:
    """Train in fp32 on the device and by a plain loop on the CPU."""
    built = our_engine(make_network(model_type), strategy, engine, "fp32", world)
    ours = our_losses(built, steps, world)
    built.close()
    return {"device": world.device.type, "ours": ours, "plain": plain_losses(make_network(model_type), steps)}


def fp32_errors(world: World) -> dict[str, float]:
    """Compute in fp32 on the device, and return the relative errors against float64 on the CPU."""
    torch.manual_seed(0)
    layers: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "matrix product": (nn.Linear(512, 512, bias=False), torch.randn(512, 512)),
        "convolution": (nn.Conv2d(64, 64, 3, bias=False), torch.randn(8, 64, 16, 16)),
        "LSTM": (_Outputs(64, 64, batch_first=True), torch.randn(8, 16, 64)),
    }
    errors = {}
    for name, (layer, values) in layers.items():
        exact = copy.deepcopy(layer).double()(values.double()).detach()
        ours = layer.to(world.device)(values.to(world.device)).detach().cpu().double()
        errors[name] = float(torch.linalg.vector_norm(ours - exact) / torch.linalg.vector_norm(exact))
    return errors


class _Outputs(nn.LSTM):
    """An LSTM that returns its outputs alone."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(values)[0]


def one_bf16_step(world: World, model_type: str, strategy: str, engine: str) -> dict[str, Any]:
    """Take one step in bf16, and compare its loss with that of the same weights on the CPU in fp32."""
    built = our_engine(make_network(model_type), strategy, engine, "bf16", world)
    before = dict(built.weights())
    (loss,) = our_losses(built, 1, world)
    after = dict(built.weights())
    built.close()
    trained = [name for name, _ in make_network(model_type).named_parameters()]
    return {
        "device": world.device.type,
        "loss": loss,
        "plain": plain_losses(make_network(model_type), 1)[0],
        "unchanged": [name for name in trained if torch.equal(before[name], after[name])],
        "not_finite": [name for name, value in after.items() if not value.isfinite().all()],
    }


TRAINABLE_MODELS = tuple(name for name, spec in MODELS.items() if not spec.always_pretrained)
