"""Checkpoints of a real engine on one rank: what an older or odd one lacks, and what is no part of the optimizer."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from small_checkpoints import ALONE, IDENTITY, forge_shard
from torch import nn

from tests.kit import assert_equal, new_model
from zerovision.models.build import BuiltModel, tensor_mismatch
from zerovision.training.base.errors import UserError
from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint.manifest import Manifest, shard_name
from zerovision.training.checkpoint.shards import Snapshot, write_shard
from zerovision.training.checkpoint.store import (
    FoundCheckpoint,
    TrainState,
    commit,
    read_manifest,
    restore,
    temporary_folder,
)
from zerovision.training.config import TrainConfig
from zerovision.training.engines.build import build_engine
from zerovision.training.engines.engine import Engine, EngineSetup
from zerovision.training.engines.parameter_shards import gather_weights
from zerovision.training.engines.ways import plan_of
from zerovision.training.recipe.optimizer import build_optimizer
from zerovision.training.steps.weight_average import WeightAverages
from zerovision.training.tasks.scores import ScoreSums

pytestmark = pytest.mark.usefixtures("no_sync")
NAME = "step-00000-0000003"
RULES = ("adamw", "sgd", "lamb")


def make_module(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    convolutions = nn.Conv2d(1, 3, 2, padding=1), nn.Conv2d(3, 2, 2)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *convolutions, nn.Flatten(), nn.Linear(8, 3))


def make_engine(optimizer: str, seed: int, module: nn.Module | None = None, fallback: str = "adamw") -> Engine:
    module = module or make_module(seed)
    config = TrainConfig(optimizer=optimizer, learning_rate=0.01, fallback_optimizer=fallback)
    rule = build_optimizer(module, config, [], discriminative=False)
    setup = EngineSetup(module, rule, plan_of("ddp", 1), "fp32", ALONE, batch_size=8, gradient_clipping=1.0)
    return build_engine(setup)


def train(engine: Engine, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        engine.backward(engine.forward(torch.randn(8, 4, generator=generator)).square().mean())
        engine.step()
    return gather_weights(engine, ALONE)


def save(folder: Path, engine: Engine) -> Path:
    temporary = temporary_folder(folder, NAME)
    temporary.mkdir()
    snapshot = Snapshot()
    state = engine.state()
    snapshot.take(state, ScoreSums(3, ALONE.device).state())
    shard = write_shard(temporary / shard_name(0), snapshot)
    config, shapes = dataclasses.asdict(TrainConfig()), {name: list(shape) for name, shape in state.shapes.items()}
    manifest = Manifest(Progress(step=3), IDENTITY, config, state.applied_steps, None, shapes, (shard,))
    commit(folder, NAME, manifest, is_best=False, keep_last=1)
    return folder / NAME


def resume(path: Path, engine: Engine) -> None:
    state = TrainState(engine, ScoreSums(3, ALONE.device), Progress())
    restore(FoundCheckpoint(path, read_manifest(path)), state, ALONE)


@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_from_before_the_first_step_goes_on(tmp_path, rule):
    whole = make_engine(rule, seed=0)
    resumed = make_engine(rule, seed=1)
    resume(save(tmp_path, whole), resumed)
    assert_equal(train(resumed, range(3)), train(whole, range(3)))
    assert resumed.state().applied_steps == whole.state().applied_steps == 3


def test_convolutions_lie_in_channels_last_and_leave_in_the_usual_order():
    engine, plain = make_engine("adamw", seed=0), make_module(seed=0)
    place_of = {
        name: place
        for bucket in engine._distribution._buckets
        for name, place in zip(bucket.parameters, bucket._places, strict=True)
    }
    for tensor in (engine.module[1].weight, engine.module[2].weight, place_of["1.weight"], place_of["2.weight"]):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    for forward, backward in ((engine.forward, engine.backward), (plain, torch.Tensor.backward)):
        backward(forward(torch.ones(8, 4)).square().mean())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(place_of[name], parameter.grad)
    assert all(parameter.grad is None for parameter in engine.module.parameters()), "each bucket has taken its own"
    leaving_tensors = gather_weights(engine, ALONE).values()
    engine.step()  # changes no copy
    for leaving, expected in zip(leaving_tensors, make_module(seed=0).parameters(), strict=True):
        assert leaving.is_contiguous()
        assert torch.equal(leaving, expected)


# the first with tables that are no part of its state dict, the second with modules of several names
@pytest.mark.parametrize("model_type", ["timm:efficientvit_m0", pytest.param("timm:coat_tiny", marks=pytest.mark.slow)])
def test_the_gathered_weights_are_timms_state_dict(model_type):
    def build() -> BuiltModel:
        torch.manual_seed(0)
        return new_model(model_type, num_classes=3, image_size=64)

    weights = gather_weights(make_engine("sgd", seed=0, module=build().module), ALONE)
    oracle = build()
    assert_equal(weights, oracle.module.state_dict())
    assert tensor_mismatch(oracle.description, {key: tensor.shape for key, tensor in weights.items()}) is None
    assert len({tensor.data_ptr() for tensor in weights.values()}) == len(weights)  # else safetensors refuses them


def test_a_checkpoint_that_has_lost_its_moments_is_refused(tmp_path):
    engine = make_engine("adamw", seed=0)
    train(engine, range(3))
    path = save(tmp_path, engine)
    tensors = load_file(path / shard_name(0))
    forge_shard(path, 0, {name: one for name, one in tensors.items() if not name.startswith("exp_avg")})
    with pytest.raises(UserError, match="its moments are none, but the optimizer has exp_avg, exp_avg_sq"):
        resume(path, engine)


def test_parameters_whose_rule_has_no_moments_are_not_frozen(tmp_path):
    """Muon's fallback is SGD without momentum: only matrices have a moment."""

    def new_engine(seed: int) -> Engine:
        torch.manual_seed(seed)
        return make_engine("muon", seed, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5)), fallback="sgd:1:momentum=0")

    whole, resumed = new_engine(seed=0), new_engine(seed=1)
    train(whole, range(3))
    assert {shard.name for shard in whole.state().shards if len(shard.tensors) > 1} == {"0.weight", "1.weight"}
    path = save(tmp_path, whole)
    resume(path, resumed)
    assert_equal(train(resumed, range(3, 6)), train(whole, range(3, 6)))
    told = r"it has moments of other parameters than the optimizer, first 1\.weight"
    frozen = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5))
    frozen[1].weight.requires_grad_(False)
    with pytest.raises(UserError, match=told):
        resume(path, make_engine("muon", 1, frozen, fallback="sgd:1:momentum=0"))
    tensors = load_file(path / shard_name(0))
    forge_shard(path, 0, {key: one for key, one in tensors.items() if not key.startswith("momentum_buffer/1.weight")})
    with pytest.raises(UserError, match=told):
        resume(path, resumed)


def test_a_file_is_written_after_the_copies_from_the_gpu_are_complete(tmp_path):
    snapshot = Snapshot()
    snapshot.take(make_engine("adamw", seed=0).state(), ScoreSums(3, ALONE.device).state())
    # Stands for the event behind copies that are still under way.
    key = next(iter(snapshot.tensors))
    snapshot.copied = SimpleNamespace(synchronize=lambda: snapshot.tensors[key].fill_(7))
    write_shard(tmp_path / "shard", snapshot)
    assert set(load_file(tmp_path / "shard")[key].flatten().tolist()) == {7}


class QueuedCopies:
    """Stands for the end of copies on a stream of a GPU: keeps what they would have copied when it is waited for."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.copied = engine, list[dict[str, torch.Tensor]]()

    def wait(self) -> None:
        self.copied.append(self.now())

    def now(self) -> dict[str, torch.Tensor]:
        shards = self._engine.state().shards
        return {f"{shard.name} {kind}": one.clone() for shard in shards for kind, one in shard.tensors.items()}


@pytest.mark.parametrize("change", ["a step", "a skipped step", "an average in use"])
def test_nothing_changes_before_a_save_has_copied_it(change):
    """Forward and backward of the next step do not wait."""
    engine = make_engine("adamw", seed=0)
    averages = WeightAverages(engine, 0.9, 0, 10)
    train(engine, range(2))
    copies = QueuedCopies(engine)
    expected = copies.now()
    engine.wait_before_change(copies)
    if change == "an average in use":
        with averages.in_use():
            assert any(not torch.equal(expected[name], now) for name, now in copies.now().items())
    else:
        loss = engine.forward(torch.randn(8, 4)).square().mean()
        engine.backward(loss * math.nan if change == "a skipped step" else loss)
        assert not copies.copied
        engine.step()
        averages.after_step(applied=change == "a step", step=3)
    (copied,) = copies.copied  # once
    assert_equal(copied, expected)
