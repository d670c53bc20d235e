"""What the tests of averaged weights run on each rank."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from timm.utils import ModelEmaV3

from tests.kit import share_apart
from tests.training.engine_ranks import (
    configuration,
    make_batch,
    make_engine,
    make_model,
    train_steps,
    whole_tensors,
    without_shared_memory,
)
from zerovision.training.engines import zero1
from zerovision.training.engines.engine import Engine
from zerovision.training.engines.parameter_shards import gather_weights
from zerovision.training.steps.weight_average import WeightAverages
from zerovision.training.world.collectives import gather_rows
from zerovision.training.world.world import World

LEAVES, STEPS, DECAY = 4, 5, 0.6


def average(world: World, over_collectives: bool = False, **changes: Any) -> dict[str, Any]:
    """Train with an EMA and lookahead, once with evaluations of the EMA in between and once without; compare."""
    accumulation = LEAVES // world.size
    config = configuration(gradient_accumulation_steps=accumulation, **changes)
    digests, result = [], {}
    for evaluates in (True, False):
        with without_shared_memory() if over_collectives else nullcontext():
            engine = make_engine(world, make_model(True), config)
        averages = WeightAverages(engine, DECAY, lookahead_steps=2, steps_per_epoch=3)
        shadow = make_model(True)
        oracle = ModelEmaV3(shadow, decay=DECAY, use_warmup=True)
        for step in range(STEPS):
            train_steps(world, engine, range(step, step + 1), accumulation)
            averages.after_step(True, step + 1)
            if evaluates:
                shadow.load_state_dict(gather_weights(engine, world) or shadow.state_dict())
                oracle.update(shadow, step=step + 1)
            if step in (2, STEPS - 1):
                engine.buffers.average(world)
            if evaluates and step in (2, STEPS - 1):
                with averages.in_use():
                    result = evaluate(world, engine, oracle.module)
        digests.append(digest(world, engine))
        engine.close()
    return result | {"digest": digests[0], "is_undisturbed": digests[0] == digests[1]}


def waits_of_lookahead(world: World, over_collectives: bool) -> int:
    """Return how often all ranks wait for each other before and after lookahead pulls, in two steps with one pull."""
    config = configuration(gradient_accumulation_steps=LEAVES // world.size, engine="torch")
    with without_shared_memory() if over_collectives else nullcontext():
        engine = make_engine(world, make_model(True), config)
    averages, barrier = WeightAverages(engine, 0, lookahead_steps=2, steps_per_epoch=3), zero1.barrier
    train_steps(world, engine, range(2), LEAVES // world.size)
    with mock.patch.object(zero1, "barrier", side_effect=barrier) as waits:
        for step in (1, 2):
            averages.after_step(True, step)
    engine.close()
    return waits.call_count


def evaluate(world: World, engine: Engine, oracle: torch.nn.Module) -> dict[str, Any]:
    """Return logits, whether what is exported has them too, whether it has timm's weights, and how often it sends."""
    engine.module.eval()
    images, _ = make_batch(99, 0)
    with torch.no_grad():
        with mock.patch.object(torch.distributed, "reduce", side_effect=torch.distributed.reduce) as sent:
            exported = gather_weights(engine, world)
        logits = engine.forward(images)  # last: an engine may keep the weights that it gathered for it
        engine.module.train()
        plain = make_model(True).eval()
        plain.load_state_dict(exported or plain.state_dict())
        difference = share_apart(plain(images), logits)
    is_timms = all(torch.equal(exported[name], weights) for name, weights in oracle.named_parameters() if exported)
    report = {"logits": logits.tolist(), "difference": difference if world.is_main else 0.0, "is_timms": is_timms}
    return report | {"sent": sent.call_count}


def digest(world: World, engine: Engine) -> str:
    """Return the sha256 of weights, moments, averages and buffers of all leaves."""
    whole, result = whole_tensors(engine), hashlib.sha256()
    assert {"ema", "slow_weights"} < whole.keys()
    for tensors in whole.values():
        for _, tensor in sorted(tensors.items()):
            result.update(tensor.contiguous().numpy().tobytes())
    for _, buffer in sorted(engine.buffers.by_name().items()):
        result.update(gather_rows(buffer.reshape(-1), world).numpy().tobytes())
    return result.hexdigest()
