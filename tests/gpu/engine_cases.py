"""What tests/gpu/test_gpu_engines.py runs inside a rank; these functions run on a CPU, too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from tests.training.engine_ranks import configuration, decayed_and_not, make_batch, make_engine, make_model, weights_of
from zerovision.training.base.points import Loggers
from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint.manifest import Manifest, shard_name
from zerovision.training.checkpoint.shards import CheckpointReader, Snapshot, write_shard
from zerovision.training.checkpoint.store import TrainState
from zerovision.training.data.reader import Batch
from zerovision.training.engines.engine import Engine
from zerovision.training.observe.observer import Seen
from zerovision.training.steps.nonfinite_steps import NonFiniteGuard
from zerovision.training.tasks.scores import ScoreSums, sample_losses
from zerovision.training.world.world import World

BATCH_SIZE = 8


def build(world: World, seed: int, *, is_frozen: bool = False, precision: str = "fp32", **changes: Any) -> Engine:
    """Build an engine over a small network with BatchNorm; the seed decides the weights and the frozen convolution."""
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    module = make_model(True)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    if is_frozen:
        module.features[3].requires_grad_(False)
    return make_engine(world, module.to(world.device), configuration(**changes), precision)


def train(world: World, engine: Engine, steps: range, poison: int = -1) -> list[float]:
    """Train, and return the losses; an image of step `poison` holds a NaN."""
    losses = []
    for step in steps:
        images, labels = (tensor.to(world.device) for tensor in make_batch(step, 0))
        if step == poison:
            images[0, 0, 0, 0] = torch.nan
        loss = sample_losses(engine.forward(images), labels).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def resume_report(world: World, folder: str, strategy: str, engine: str, optimizer: str, is_frozen: bool):
    """Train 4 steps at once, and 2 + 2 through a checkpoint's files."""
    case: dict[str, Any] = {"strategy": strategy, "engine": engine, "optimizer": optimizer, "is_frozen": is_frozen}
    whole = build(world, 0, **case)
    train(world, whole, range(2))
    snapshot, sums = Snapshot(), ScoreSums(10, world.device).state()
    old = whole.state()
    snapshot.take(old, sums)
    shapes = {name: list(shape) for name, shape in old.shapes.items()}
    # The copies are queued before these steps, which change what is copied.
    losses = train(world, whole, range(2, 4))
    path = Path(folder) / "-".join(map(str, case.values()))
    path.mkdir()
    facts = write_shard(path / shard_name(0), snapshot)
    manifest = Manifest(Progress(), {}, {}, old.applied_steps, None, shapes, (facts,))
    expected = {"losses": losses, "weights": weights_of(whole)}
    whole.close()
    resumed = build(world, 1, **case)
    train(world, resumed, range(7, 8))  # its earlier state must not matter
    reader = CheckpointReader(path, manifest)
    resumed.load_state(reader.tensors, reader.buffers([0], 1), old.applied_steps)
    found = {"losses": train(world, resumed, range(2, 4)), "weights": weights_of(resumed)}
    steps = resumed.state().applied_steps
    resumed.close()
    return {
        "device": world.device.type,
        "expected": expected,
        "found": found,
        "applied_steps": [old.applied_steps, steps],
    }


def skipped_first_step_report(world: World, strategy: str, engine: str, optimizer: str):
    """Skip the first step for a NaN, and go on; and the same run without that step."""
    case: dict[str, Any] = {"strategy": strategy, "engine": engine, "optimizer": optimizer}
    states = []
    for first in (0, 1):
        built = build(world, 0, **case)
        buffers = {name: buffer.clone() for name, buffer in built.module.named_buffers()}
        train(world, built, range(first, 1), poison=0)
        for name, buffer in built.module.named_buffers():  # the step guard's part
            buffer.copy_(buffers[name])
        train(world, built, range(1, 4))
        states.append({"weights": weights_of(built), "applied_steps": built.state().applied_steps})
        built.close()
    return states


def copy_report(world: World, engine: str, precision: str):
    """Train a model after it was copied, then zero the copy's weights; return whose logits changed, and the last."""
    built = build(world, 0, engine=engine, precision=precision)
    images = make_batch(0, 0)[0].to(world.device)
    copied = copy.deepcopy(built.module)
    before = [copied(images).detach(), built.forward(images).detach()]
    train(world, built, range(2))
    after = [copied(images).detach(), built.forward(images).detach()]
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    largest = [float(logits.abs().max()) for logits in (copied(images), built.forward(images))]
    built.close()
    return {
        "changed": [not torch.equal(old, new) for old, new in zip(before, after, strict=True)],
        "zeroed": largest[0],
        "trained": largest[1],
    }


def accumulation_report(world: World, micro_steps: int):
    """Note micro-batches of 6 MiB each; return the bytes that stay on the GPU until the verdict."""
    engine = build(world, 0, engine="torch")
    state = TrainState(engine, ScoreSums(2, world.device), Progress())
    guard = NonFiniteGuard(state, world, Loggers([]), 0, str)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    guard.before_step(0)
    for _ in range(micro_steps):
        images = torch.zeros(BATCH_SIZE, 3, 256, 256, device=world.device)
        numbers = torch.zeros(BATCH_SIZE, device=world.device)
        batch = Batch(images, numbers.long(), numbers, torch.arange(BATCH_SIZE))
        guard.seen(Seen(batch, numbers, numbers, numbers))
        del images, numbers
    return torch.cuda.memory_allocated() - before


def leaves_report(world: World, leaves: int):
    """Take one step on so many leaves, by the engine and by hand; return the weights and each leaf's statistics.

    By hand, every leaf has a copy of the model, and their gradients are added pair by pair: whichever rank computes a
    leaf, these are the numbers that are added.
    """
    engine = build(world, 0, engine="torch", optimizer="sgd", gradient_clipping=0.0, gradient_accumulation_steps=leaves)
    plain = copy.deepcopy(engine.module)
    copies = [copy.deepcopy(plain) for _ in range(leaves)]
    for leaf, module in enumerate(copies):
        images, labels = (tensor.to(world.device) for tensor in make_batch(0, leaf))
        (sample_losses(module(images), labels).mean() * (1 / leaves)).backward()
        engine.backward(sample_losses(engine.forward(images), labels).mean())
        engine.step()
    rows = [[parameter.grad for parameter in module.parameters()] for module in copies]
    while len(rows) > 1:
        pairs = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(rows[::2], rows[1::2], strict=False)]
        rows = pairs + rows[2 * len(pairs) :]
    for parameter, gradient in zip(plain.parameters(), rows[0], strict=True):
        parameter.grad = gradient
    config = configuration()
    groups = decayed_and_not(plain, config.weight_decay)
    torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, nesterov=True, fused=True).step()
    statistics = {
        name: torch.stack([dict(one.named_buffers())[name] for one in copies]) for name in engine.buffers.by_name()
    }
    return {
        "expected": {
            name: tensor.tolist() for name, tensor in {**dict(plain.named_parameters()), **statistics}.items()
        },
        "found": {
            name: tensor.tolist()
            for name, tensor in {**dict(engine.module.named_parameters()), **engine.buffers.by_name()}.items()
        },
    }


def compiled_report(world: World, strategy: str):
    """Train with and without `torch.compile` in the mode that a small batch gets; return the losses."""
    losses = []
    for choice in ("off", "on"):
        engine = build(world, 0, engine="torch", strategy=strategy, compile=choice)
        losses.append(train(world, engine, range(6)))
        engine.close()
    return losses
