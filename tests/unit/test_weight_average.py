"""Averages of the weights on one rank, against timm's."""

from __future__ import annotations

import pytest
import torch
from timm.optim import Lookahead, create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import nn

from tests.kit import ALONE, ROUNDING, assert_equal, assert_same_but_rounding, train
from tests.training.commands import read_metrics
from zerovision.delivery.evaluate import evaluate
from zerovision.training.config import TrainConfig
from zerovision.training.engines.build import build_engine
from zerovision.training.engines.engine import Engine, EngineSetup
from zerovision.training.engines.model_buffers import AVERAGE
from zerovision.training.engines.parameter_shards import gather_weights
from zerovision.training.engines.ways import plan_of
from zerovision.training.recipe.optimizer import build_optimizer
from zerovision.training.steps.weight_average import EMA, WeightAverages, ema_decay_at

DECAY = 0.7  # reached at the seventh step
STEPS = 8


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


def make_engine(optimizer: str = "adamw") -> Engine:
    module, config = make_module(), TrainConfig(optimizer=optimizer, learning_rate=0.01)
    rule = build_optimizer(module, config, [], discriminative=False)
    return build_engine(EngineSetup(module, rule, plan_of("ddp", 1), "fp32", ALONE, batch_size=8))


def make_loss(forward, step: int) -> torch.Tensor:
    images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(step))
    return forward(images).square().mean()


def train_step(engine: Engine, step: int) -> None:
    engine.backward(make_loss(engine.forward, step))
    engine.step()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_ema_of_weights_and_buffers_is_timms_to_the_bit_and_leaves_the_training_alone(optimizer):
    engine, alone = make_engine(optimizer), make_engine(optimizer)
    averages = WeightAverages(engine, DECAY, 0, steps_per_epoch=STEPS)
    shadow = make_module()
    oracle = ModelEmaV3(shadow, decay=DECAY, use_warmup=True)
    for step in range(1, STEPS + 1):
        for trained in (engine, alone):
            train_step(trained, step)
        averages.after_step(True, step)
        raw = gather_weights(engine, ALONE)
        shadow.load_state_dict(raw)
        oracle.update(shadow, step=step)
        with averages.in_use():
            assert_equal(gather_weights(engine, ALONE), oracle.module.state_dict())
            engine.module.eval()
            with torch.no_grad():
                inside = make_loss(engine.forward, 0)
                # The engine's weights may lie otherwise in memory: the same weights, other kernels.
                assert_same_but_rounding(inside, make_loss(oracle.module, 0))
            engine.module.train()
        assert_equal(gather_weights(engine, ALONE), raw)
    assert not torch.equal(oracle.module[0].weight, shadow[0].weight), "else the average means nothing"
    assert_equal(gather_weights(engine, ALONE), gather_weights(alone, ALONE))


def test_the_decay_warms_up_as_timms():
    oracle = ModelEmaV3(nn.Linear(1, 1), decay=0.99, use_warmup=True)
    steps = range(1, 2000)
    assert [ema_decay_at(step, 0.99) for step in steps] == [oracle.get_decay(step) for step in steps]
    assert ema_decay_at(1999, 0.99) == 0.99


@pytest.mark.parametrize(
    ("applied", "changes"), [(True, True), (torch.tensor(True), True), (torch.tensor(False), False)]
)
def test_a_skipped_step_leaves_the_ema_alone_also_if_the_verdict_is_on_the_device(applied, changes):
    engines = [make_engine() for _ in range(2)]
    both = [WeightAverages(engine, DECAY, 0, steps_per_epoch=STEPS) for engine in engines]
    for engine, averages in zip(engines, both, strict=True):
        for step in (1, 2):
            train_step(engine, step)
            averages.after_step(True, step)
        kept = engine.buffers.copy()
        train_step(engine, 3)
        if not changes:
            engine.buffers.restore(kept)  # as NonFiniteGuard does first
    averages_of = [ema_of(engine) for engine in engines]
    both[0].after_step(applied, 3)
    both[1].after_step(changes, 3)
    assert_equal(ema_of(engines[0]), ema_of(engines[1]))
    is_same = all(torch.equal(now, averages_of[0][name]) for name, now in ema_of(engines[0]).items())
    assert is_same != changes


def ema_of(engine: Engine) -> dict[str, torch.Tensor]:
    state = engine.state()
    weights = {shard.name: shard.tensors[EMA].clone() for shard in state.shards}
    return weights | {name: buffer.clone() for name, buffer in state.buffers.items() if name.startswith(AVERAGE)}


@pytest.mark.parametrize(("k", "steps_per_epoch"), [(3, 8), (3, 2), (1, 100)])
def test_lookahead_is_timms_with_its_pull_at_the_end_of_an_epoch(k, steps_per_epoch):
    engine, module = make_engine(), make_module()
    averages = WeightAverages(engine, 0.0, k, steps_per_epoch)
    groups = [{"params": [p], "weight_decay": 0.05 if p.ndim > 1 else 0.0} for p in module.parameters()]
    oracle = Lookahead(create_optimizer_v2(groups, opt="adamw", lr=0.01), alpha=0.5, k=k)
    for step in range(1, STEPS + 1):
        train_step(engine, step)
        averages.after_step(True, step)
        oracle._base_optimizer.zero_grad()
        make_loss(module, step).backward()
        oracle.step()
        if step % steps_per_epoch == 0:
            oracle.sync_lookahead()
    ours = gather_weights(engine, ALONE)
    # AdamW divides a gradient by its size: the rounding of a small one moves a weight as far as that of a large one.
    assert_same_but_rounding(ours, module.state_dict(), 10 * ROUNDING)


def test_averages_stay_when_the_optimizer_restarts():
    engine = make_engine()
    WeightAverages(engine, DECAY, 2, steps_per_epoch=STEPS).after_step(True, 1)
    train_step(engine, 1)
    before = ema_of(engine)
    engine.restart_optimizer()
    assert_equal(ema_of(engine), before)
    assert not any(shard.tensors["exp_avg"].any() for shard in engine.state().shards)


@pytest.mark.parametrize("on_device", [False, True])
def test_lookahead_pulls_nothing_after_a_skipped_step(on_device):
    engine = make_engine()
    averages = WeightAverages(engine, 0.0, 2, steps_per_epoch=STEPS)
    for step in range(1, STEPS + 1):
        train_step(engine, step)
        before = gather_weights(engine, ALONE)
        applied = step != 4
        averages.after_step(torch.tensor(applied) if on_device else applied, step)
        after = gather_weights(engine, ALONE)
        is_same = all(torch.equal(after[name], before[name]) for name in before)
        assert is_same == (step not in (6, 8)), "the first pull, of step 2, moves nothing"


def test_a_run_without_averages_has_none_in_its_state():
    engine = make_engine()
    before = engine.state()
    averages = WeightAverages(engine, 0.0, 0, steps_per_epoch=STEPS)
    train_step(engine, 1)
    averages.after_step(True, 1)
    with averages.in_use():
        pass
    after = engine.state()
    assert (after.moment_kinds, after.buffers.keys()) == (before.moment_kinds, before.buffers.keys())
    assert {kind for shard in after.shards for kind in shard.tensors} == {"weights", "exp_avg", "exp_avg_sq"}


def test_the_average_is_scored_and_exported(tmp_path):
    scores = {}
    for name, ema in (("plain", 0.0), ("average", 0.9)):
        folder = train(tmp_path, name, data="fake", image_size=8, batch_size=125, epochs=2, ema=ema)
        scores[name] = [(line["val_top1"], line["val_loss"]) for line in read_metrics(folder, "epoch")]
    assert scores["average"] != scores["plain"]
    best = max(scores["average"], key=lambda one: (one[0], -one[1]))
    exported = evaluate(folder, split="val", output=None)
    assert exported["top1"] == pytest.approx(best[0], abs=1e-12)
    assert exported["loss"] == pytest.approx(best[1], rel=ROUNDING)
