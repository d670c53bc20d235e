"""Learning rates against closed forms and PyTorch's own schedules, parameter groups, and the state of optimizers."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn
from torch.optim import lr_scheduler

from zerovision.models.basic_cnn import BasicCNN
from zerovision.models.ensemble import Ensemble
from zerovision.training.base.errors import UserError
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.recipe.optimizer import build_optimizer, create_state, moment_kinds, set_applied_steps
from zerovision.training.recipe.schedule import SCHEDULES, build_schedule, schedule_notes

CONFIG = TrainConfig(epochs=10, warmup_epochs=2, learning_rate=0.1, final_learning_rate_scale=0.0)


def schedule_of(*, steps_per_epoch=5, global_batch=32, head_epochs=0, **changes):
    return build_schedule(dataclasses.replace(CONFIG, **changes), steps_per_epoch, global_batch, head_epochs)


def rule_of(module, **changes):
    return build_optimizer(module, dataclasses.replace(CONFIG, **changes), [], discriminative=False)


def rates(schedule, steps):
    return [schedule.learning_rate(step) for step in range(steps)]


def rates_of_pytorch(*parts, steps=50):
    """Return the rates of PyTorch's schedulers one after another, each given as (steps, name, options)."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedulers = [getattr(lr_scheduler, name)(optimizer, **options) for _, name, options in parts]
    ends = list(itertools.accumulate(steps for steps, _, _ in parts))[:-1]
    oracle = lr_scheduler.SequentialLR(optimizer, schedulers, milestones=ends)
    expected = []
    for _ in range(steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        oracle.step()
    return expected


WARM_UP = (10, "LinearLR", {"start_factor": 0.1, "total_iters": 9})
CONSTANT = ("ConstantLR", {"factor": 1.0, "total_iters": 0})
STABLE = (25, *CONSTANT)
ENDED = {"lr_lambda": lambda _step: 0.0}


@pytest.mark.parametrize(
    ("changes", "oracle"),
    [
        ({}, [WARM_UP, (40, "CosineAnnealingLR", {"T_max": 40})]),
        ({"cooldown_epochs": 2}, [WARM_UP, (30, "CosineAnnealingLR", {"T_max": 30}), (10, "LambdaLR", ENDED)]),
        ({"schedule": "linear"}, [WARM_UP, (40, "LinearLR", {"start_factor": 1, "end_factor": 0, "total_iters": 40})]),
        ({"schedule": "polynomial:2"}, [WARM_UP, (40, "PolynomialLR", {"power": 2.0, "total_iters": 40})]),
        ({"schedule": "constant"}, [WARM_UP, (40, *CONSTANT)]),
        (
            {"schedule": "step:5,3.2,9:0.5", "warmup_epochs": 0},
            [(50, "MultiStepLR", {"milestones": [16, 25, 45], "gamma": 0.5})],
        ),
        ({"schedule": "step:3", "warmup_epochs": 0}, [(50, "StepLR", {"step_size": 15, "gamma": 0.1})]),
        (
            {"schedule": "wsd:3:linear"},
            [WARM_UP, STABLE, (15, "LinearLR", {"start_factor": 1, "end_factor": 0, "total_iters": 15})],
        ),
        (
            {"schedule": "wsd:auto:cosine", "cooldown_epochs": 1},  # a fifth of the run
            [WARM_UP, STABLE, (10, "CosineAnnealingLR", {"T_max": 10}), (5, "LambdaLR", ENDED)],
        ),
        (
            {"schedule": "wsd", "warmup_epochs": 0},
            [(40, *CONSTANT), (10, "LambdaLR", {"lr_lambda": lambda step: 1 - (step / 10) ** 0.5})],
        ),
    ],
)
def test_equals_pytorchs_schedulers(changes, oracle):
    expected = rates_of_pytorch(*oracle)
    assert rates(schedule_of(**changes), 50) == pytest.approx(expected, abs=1e-9)
    assert len({*expected}) > 3


@pytest.mark.parametrize("cooldown", [0.3, 0.333333, 1 / 3, 0.1234567])
def test_the_decay_of_wsd_begins_where_the_check_says(cooldown):
    config = dataclasses.replace(CONFIG, schedule="wsd:2.5", cooldown_epochs=cooldown)
    with pytest.raises(UserError, match="use wsd:") as caught:
        check_config(config, FLAG_OF)
    given = dataclasses.replace(config, schedule=str(caught.value).partition("use ")[2].rstrip("."))
    assert check_config(given, FLAG_OF) == given
    assert schedule_of(schedule=given.schedule, cooldown_epochs=cooldown).stable_steps == 35


def test_a_cooldown_right_after_the_warm_up_is_at_the_final_rate():
    schedule = schedule_of(warmup_epochs=4.0, cooldown_epochs=6.0, final_learning_rate_scale=0.25)
    assert schedule.learning_rate(19) == pytest.approx(0.1)
    assert rates(schedule, 50)[20:] == pytest.approx([0.025] * 30)


@pytest.mark.parametrize("changes", [{"schedule": name} for name in SCHEDULES] + [{"cooldown_epochs": 3.0}])
def test_every_schedule_is_positive_and_ends_where_it_is_told(changes):
    schedule = schedule_of(final_learning_rate_scale=0.25, **changes)
    end = {"step": 0.01 * 0.1, "constant": 0.1}.get(changes.get("schedule"), 0.025)
    assert schedule.learning_rate(50) == pytest.approx(end)
    assert max(rates(schedule, 50)) == pytest.approx(0.1)
    assert min(rates(schedule, 60)) >= min(end, 0.01) * 0.999


@pytest.mark.parametrize(
    ("given", "epochs", "steps_per_epoch", "steps"),
    [
        ("auto", 30, 45, 45),
        ("auto", 15, 45, 45),
        ("auto", 4, 45, 18),
        ("auto", 1, 45, 4),
        ("auto", 1, 9, 0),
        (1, 1, 45, 45),
    ],
)
def test_the_warm_up_is_an_epoch_but_at_most_a_tenth_of_the_run_unless_given(given, epochs, steps_per_epoch, steps):
    assert TrainConfig().warmup_epochs == "auto"
    schedule = schedule_of(epochs=epochs, warmup_epochs=given, steps_per_epoch=steps_per_epoch)
    assert schedule.warmup_steps == steps


@pytest.mark.parametrize(
    ("model_type", "rate", "warmup_epochs", "epochs", "steps_per_epoch", "steps"),
    [
        ("mobilenet", 0.003, "auto", 4, 20, 50),
        ("mobilenet", 0.003, "auto", 30, 60, 60),
        ("mobilenet", 0.003, 0, 4, 20, 0),
        ("mobilenet", 0.001, "auto", 4, 20, 8),
        ("basic_cnn", 0.003, "auto", 4, 20, 8),
    ],
)
def test_a_networks_own_high_rate_is_warmed_up_to_in_50_steps_also_if_the_run_is_short(
    model_type, rate, warmup_epochs, epochs, steps_per_epoch, steps
):
    """Without that a training on 14 images diverges: the first steps throw mobilenet off."""
    changes = {"model_type": model_type, "learning_rate": rate, "warmup_epochs": warmup_epochs, "epochs": epochs}
    assert schedule_of(steps_per_epoch=steps_per_epoch, **changes).warmup_steps == steps


@pytest.mark.parametrize(("warmup_epochs", "noted"), [(2, True), (1, False), ("auto", False)])
def test_a_warm_up_longer_than_half_the_run_is_noted(warmup_epochs, noted):
    notes = schedule_notes(schedule_of(epochs=2, warmup_epochs=warmup_epochs))
    assert [note.startswith("the learning rate warms up in 10 of 10 steps") for note in notes] == [True] * noted


@pytest.mark.parametrize(
    ("schedule", "note"),
    [
        ("step:30,60", "no decay of --schedule step falls within the run"),
        ("step:50", "no decay of --schedule step falls within the run"),
        ("step:5,30,60", "2 of the 3 decays of --schedule step come after the run's end"),
        ("step:25,", "no decay of --schedule step falls within the run"),
        ("step:5,19", None),
        ("step", None),
    ],
)
def test_decays_after_the_end_of_the_run_are_noted(schedule, note):
    notes = schedule_notes(schedule_of(epochs=20, schedule=schedule))
    assert [found[: len(note or "")] for found in notes] == [note] * (note is not None)


def test_linear_scaling_only_where_asked_for():
    assert schedule_of(base_batch_size=256, global_batch=1024).peak == pytest.approx(0.4)
    assert schedule_of(global_batch=1024).peak == 0.1


def test_the_backbone_is_frozen_in_the_head_epochs():
    schedule = schedule_of(head_epochs=3)
    backbone, head = {"rate_scale": 0.1, "is_backbone": True}, {"rate_scale": 1.0, "is_backbone": False}
    for step in range(16):
        schedule.set_learning_rates([backbone, head], step)
        assert head["lr"] == schedule.learning_rate(step) > 0
        assert backbone["lr"] == (0.0 if step < 15 else pytest.approx(0.1 * schedule.learning_rate(15)))


def test_the_head_learns_first_whatever_its_own_rate_and_rule():
    module = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    config = dataclasses.replace(CONFIG, optimizer="muon", fallback_optimizer="adamw:10")  # 10 x 0.1 for vectors
    optimizer = build_optimizer(module, config, {"2.weight", "2.bias"}, discriminative=True)
    build_schedule(config, 5, 32, head_epochs=1).set_learning_rates(optimizer.param_groups, step=0)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert [rates[id(p)] for p in module.parameters()] == [0.0, 0.0, pytest.approx(0.1), pytest.approx(0.1)]


def test_groups_tell_decay_and_head():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    head = {"3.weight", "3.bias"}
    optimizer = build_optimizer(module, CONFIG, head, discriminative=True)
    assert settings_of(module, optimizer, "rate_scale") == {
        "0.weight": (0.05, 0.1),
        "0.bias": (0.0, 0.1),
        "1.weight": (0.0, 0.1),
        "1.bias": (0.0, 0.1),
        "3.weight": (0.05, 1.0),
        "3.bias": (0.0, 1.0),
    }
    same_rate = build_optimizer(module, CONFIG, head, discriminative=False)
    assert {group["rate_scale"] for group in same_rate.param_groups} == {1.0}


def test_a_fused_rule_counts_beside_its_weights_and_the_others_on_the_cpu():
    """The fused kernels of a GPU read the count there; a CPU has no second place, so 'meta' stands for the GPU."""
    module = nn.Linear(3, 2, device="meta")
    for name, place, moment in (("adamw", "meta", "exp_avg"), ("rmsprop", "cpu", "square_avg")):
        optimizer = rule_of(module, optimizer=name)
        create_state(optimizer, module.parameters())
        assert {state["step"].device.type for state in optimizer.state.values()} == {place}
        assert {state[moment].device.type for state in optimizer.state.values()} == {"meta"}


def test_sgd_without_momentum_keeps_nothing():
    module = nn.Linear(3, 2)
    optimizer = rule_of(module, optimizer="sgd", momentum=0.0)
    create_state(optimizer, module.parameters())
    assert moment_kinds(optimizer) == ()
    assert [*optimizer.state.values()] == [{}, {}]
    before = module.bias.detach().clone()
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(before - module.bias, torch.full((2,), 0.1))


def test_the_count_of_updates_reaches_adams_bias_correction():
    whole, split = nn.Linear(3, 2), nn.Linear(3, 2)
    rules = [rule_of(module) for module in (whole, split)]
    for module, rule in zip((whole, split), rules, strict=True):
        create_state(rule, module.parameters())
        nn.init.ones_(module.weight), nn.init.ones_(module.bias)
    set_applied_steps(rules[1], 7)
    for module, rule in zip((whole, split), rules, strict=True):
        module(torch.ones(1, 3)).sum().backward()
        rule.step()
    # With zero moments a step is proportional to (1 - beta2^t)^0.5 / (1 - beta1^t).
    moved = [(1 - module.bias).mean().item() for module in (whole, split)]
    factor = [(1 - 0.999**step) ** 0.5 / (1 - 0.9**step) for step in (1, 8)]
    assert moved[1] / moved[0] == pytest.approx(factor[1] / factor[0], rel=1e-3)


VIT, MOBILENET = "vit_tiny_patch16_224", "mobilenetv3_small_100"


def make_model(name: str) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, num_classes=5)


def settings_of(module: nn.Module, optimizer: torch.optim.Optimizer, rate: str) -> dict[str, tuple[float, float]]:
    """Return weight decay and factor on the learning rate of each parameter."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        names[id(parameter)]: (group["weight_decay"], group.get(rate, 1.0))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def ours(module: nn.Module, **changes: object) -> dict[str, tuple[float, float]]:
    return settings_of(module, rule_of(module, weight_decay=0.3, **changes), "rate_scale")


@pytest.mark.parametrize("layer_decay", [1.0, 0.75])
@pytest.mark.parametrize("name", [VIT, MOBILENET])
def test_groups_are_timms(name, layer_decay):
    module = make_model(name)
    oracle = create_optimizer_v2(module, "adamw", lr=0.1, weight_decay=0.3, layer_decay=layer_decay)
    expected = settings_of(module, oracle, "lr_scale")
    assert ours(module, layer_decay=layer_decay, no_weight_decay="model") == expected
    scales = {scale for _, scale in expected.values()}
    assert len(scales) == (1 if layer_decay == 1 else 14)
    assert max(scales) == 1


def test_position_embeddings_decay_unless_the_model_is_asked():
    module = make_model(VIT)
    vectors = ours(module)
    assert vectors == {name: (0.3 if p.ndim > 1 else 0.0, 1.0) for name, p in module.named_parameters()}
    spared = ours(module, no_weight_decay="model")
    assert {name for name in vectors if vectors[name] != spared[name]} == {"pos_embed", "cls_token"}


def test_the_head_learns_at_the_full_rate_and_a_backbone_at_its_share_of_each_layers():
    module = make_model(VIT)
    config = dataclasses.replace(CONFIG, layer_decay=0.5, backbone_learning_rate_scale=0.1)
    optimizer = build_optimizer(module, config, {"head.weight", "head.bias"}, discriminative=True)
    found, alone = settings_of(module, optimizer, "rate_scale"), ours(module, layer_decay=0.5)
    for name, (_, scale) in found.items():
        assert scale == (1.0 if name.startswith("head.") else 0.1 * alone[name][1])
    assert {group["lr"] for group in optimizer.param_groups} == {0.1 * scale for _, scale in found.values()}


def test_members_of_an_ensemble_have_layers_of_their_own():
    members = [make_model(MOBILENET), make_model(VIT)]
    expected = {
        f"members.{number}.{name}": value
        for number, member in enumerate(members)
        for name, value in ours(member, layer_decay=0.75).items()
    }
    assert ours(Ensemble(members), layer_decay=0.75) == expected


def test_a_model_without_layers_or_of_which_one_is_trained_is_refused():
    only_head = BasicCNN(5, 3)
    only_head.blocks.requires_grad_(False)
    for model in (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), only_head):
        with pytest.raises(UserError, match=r"^--layer-decay 0.75: only one layer of \w+ is trained[^\n]*$"):
            ours(model, layer_decay=0.75)
    assert ours(BasicCNN(5, 3), no_weight_decay="model") == ours(BasicCNN(5, 3))


def test_the_blocks_of_our_own_models_are_layers():
    scales = {name: scale for name, (_, scale) in ours(BasicCNN(5, 3), layer_decay=0.5).items()}
    assert [scales[f"blocks.{block}.0.weight"] for block in range(3)] == [0.125, 0.25, 0.5]
    assert scales["head.weight"] == 1


def test_frozen_parameters_are_in_no_group():
    module = make_model(VIT)
    module.patch_embed.requires_grad_(False)
    assert not any(name.startswith("patch_embed") for name in ours(module, layer_decay=0.75))
