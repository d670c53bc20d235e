"""The table of update rules against timm's optimizers: what each needs to see, and the state that it begins with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

import pytest
import torch
from small_checkpoints import ALONE
from timm.optim import Muon, create_optimizer_v2, muon
from torch import nn

from tests.kit import assert_same_but_rounding, new_model
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.engines.build import build_engine, set_up_engine
from zerovision.training.engines.engine import EngineSetup
from zerovision.training.engines.ways import STRATEGIES, plan_of
from zerovision.training.recipe.optimizer import (
    build_optimizer,
    create_state,
    moment_kinds,
    moments_of,
    rules_of,
    set_applied_steps,
)
from zerovision.training.recipe.rules import (
    ELEMENT_WISE,
    MATRIX_RULES,
    SHIFTED_RATE,
    WHOLE_PARAMETER,
)

CONFIG = TrainConfig(learning_rate=0.01, weight_decay=0.05)


def make(name: str, head: Collection[str] = (), **changes):
    """Return a small network and a rule over its convolution, matrix and vectors.

    Their sizes are multiples of 64, as where engines cut: the last few values of a vector may be rounded otherwise.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(4, 64, 3), nn.Flatten(), nn.Linear(64, 64))
    config = dataclasses.replace(CONFIG, optimizer=name, **changes)
    return module, build_optimizer(module, config, head, discriminative=False)


def set_gradients(module: nn.Module, step: int) -> None:
    """Set other gradients for each step."""
    generator = torch.Generator().manual_seed(step)
    for number, weight in enumerate(module.parameters()):
        weight.grad = torch.randn(weight.shape, generator=generator) * (number + 1)


def train(module: nn.Module, rule: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    for step in steps:
        set_gradients(module, step)
        rule.step()
    return [weight.detach().clone() for weight in module.parameters()]


def train_flat(name: str, cut: int) -> list[torch.Tensor]:
    """Train as an engine of flat parts does: each group one vector, here in two parts."""
    module, rule = make(name)
    parts: list[tuple[list[nn.Parameter], list[nn.Parameter]]] = []
    for group in rule.param_groups:
        members = group["params"]
        flat = torch.cat([member.detach().flatten() for member in members])
        group["params"] = [nn.Parameter(part) for part in flat.split([cut, len(flat) - cut])]
        parts.append((members, group["params"]))
    create_state(rule, [part for _, masters in parts for part in masters])
    for step in range(3):
        set_gradients(module, step)
        for members, masters in parts:
            gradient = torch.cat([member.grad.flatten() for member in members])
            for master, part in zip(masters, gradient.split([cut, len(gradient) - cut]), strict=True):
                master.grad = part.clone()
        rule.step()
        for members, masters in parts:
            for member, values in zip(
                members, torch.cat([*masters]).split([member.numel() for member in members]), strict=True
            ):
                member.data.copy_(values.detach().view(member.shape))
    return [weight.detach() for weight in module.parameters()]


@pytest.mark.parametrize("name", [*ELEMENT_WISE, *WHOLE_PARAMETER])
def test_flat_parts_give_the_bits_of_whole_parameters_iff_a_rule_is_element_wise(name):
    module, rule = make(name)
    create_state(rule, module.parameters())
    whole = train(module, rule, range(3))
    if name in MATRIX_RULES:
        with pytest.raises(AssertionError, match="Input must be 2D or 3D"):
            train_flat(name, cut=64)
        return
    is_same = all(torch.equal(ours, theirs) for ours, theirs in zip(train_flat(name, cut=64), whole, strict=True))
    assert is_same == (name in ELEMENT_WISE)


@pytest.mark.parametrize("name", [*ELEMENT_WISE, *WHOLE_PARAMETER])
def test_created_state_and_what_a_checkpoint_holds_of_it_give_the_bits_of_the_rule_itself(name):
    first, own = make(name)
    whole = train(first, own, range(5))
    module, rule = make(name)
    create_state(rule, module.parameters())
    if name in ("adamw", "sgd", "lamb"):
        for mine, theirs in zip(module.parameters(), first.parameters(), strict=True):
            created, state = rule.state[mine], own.state[theirs]
            assert created.keys() == state.keys()
            assert all((created[key].dtype, created[key].device) == (v.dtype, v.device) for key, v in state.items())
            assert not any(value.any() for value in created.values())
    train(module, rule, range(2))
    kinds = moment_kinds(rule)
    stored = [{kind: value.clone() for kind, value in moments_of(rule, p).items()} for p in module.parameters()]
    assert {kind for one in stored for kind in one} == {*kinds}
    resumed, again = make(name)
    create_state(again, resumed.parameters())
    for old, new, moments in zip(module.parameters(), resumed.parameters(), stored, strict=True):
        assert all(value.shape == new.shape for value in moments.values())
        new.data.copy_(old.detach())
        for kind, value in moments.items():
            moments_of(again, new)[kind].copy_(value)
    set_applied_steps(again, 2)
    for ours, expected in zip(train(resumed, again, range(2, 5)), whole, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", [name for name in [*ELEMENT_WISE, *WHOLE_PARAMETER] if name not in MATRIX_RULES])
def test_a_rule_is_timms_by_that_name(name):
    module, rule = make(name)
    ours = train(module, rule, range(3))
    module, rule = make(name)
    groups = [{key: group[key] for key in ("params", "weight_decay")} for group in rule.param_groups]
    unclipped = {"max_grad_norm": None} if name == "lamb" else {}
    oracle = create_optimizer_v2(groups, opt=name, lr=CONFIG.learning_rate, momentum=CONFIG.momentum, **unclipped)
    for one, other in zip(ours, train(module, oracle, range(3)), strict=True):
        assert_same_but_rounding(one, other)


@pytest.mark.parametrize("name", MATRIX_RULES)
@pytest.mark.parametrize("fallback", ["adamw", "sgd"])
def test_matrices_and_convolutions_are_timms_muons_and_the_rest_another_rules(name, fallback):
    changes = {"fallback_optimizer": f"{fallback}:0.5"}
    module, rule = make(name, **changes)
    assert [type(one).__name__ for one in rules_of(rule)] == ["Muon", {"adamw": "AdamW", "sgd": "SGD"}[fallback]]
    assert [group["rate_scale"] for group in rule.param_groups] == [1.0, 0.5]
    ours = train(module, rule, range(3))
    module, _ = make(name, **changes)
    matrices, vectors = ([p for p in module.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    timms = create_optimizer_v2(matrices, opt=name, lr=0.01, weight_decay=0.05, momentum=CONFIG.momentum)
    assert isinstance(timms, Muon)
    other = create_optimizer_v2(vectors, opt=fallback, lr=0.005, weight_decay=0.0, momentum=CONFIG.momentum)
    for step in range(3):
        set_gradients(module, step)
        timms.step()
        other.step()
    for one, theirs in zip(ours, module.parameters(), strict=True):
        assert_same_but_rounding(one, theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", MATRIX_RULES)
def test_a_run_in_fp32_has_muons_products_in_fp32(name, precision):
    """Beside products in fp64; timm's are in bf16, and still are after a step in fp32."""
    in_bf16 = muon.zeropower_via_newtonschulz
    (module, rule), (theirs, _) = make(name, precision=precision), make(name)
    given, muon_rule = [theirs[0].weight, theirs[2].weight], rules_of(rule)[0]
    before = [weight.detach().clone() for weight in given]
    timms = create_optimizer_v2(given, opt=name, lr=0.01, weight_decay=0.05, momentum=CONFIG.momentum)
    set_gradients(module, 0)
    set_gradients(theirs, 0)
    muon_rule.step()
    assert muon.zeropower_via_newtonschulz is in_bf16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "zeropower_via_newtonschulz", functools.partial(in_bf16, dtype=torch.float64))
        timms.step()
    ours = [module[0].weight, module[2].weight]
    apart = max((own - other).abs().max().item() for own, other in zip(ours, given, strict=True))
    step = max((other - old).abs().max().item() for other, old in zip(given, before, strict=True))
    assert apart < 1e-3 * step if precision == "fp32" else apart > 1e-3 * step


@pytest.mark.parametrize("name", [name for name in [*ELEMENT_WISE, *WHOLE_PARAMETER] if name not in SHIFTED_RATE])
def test_weights_stay_at_a_rate_of_0(name):
    """As those of the backbone must while only the head learns, whose gradients are 0 too."""
    module, rule = make(name)
    create_state(rule, module.parameters())
    before = [weight.detach().clone() for weight in module.parameters()]
    for group in rule.param_groups:
        group["lr"] = 0.0
    for _ in range(20):
        for weight in module.parameters():
            weight.grad = torch.zeros_like(weight)
        rule.step()
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_the_head_and_depthwise_convolutions_are_the_fallbacks():
    module = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 1), nn.Flatten(), nn.Linear(16, 10))
    config = dataclasses.replace(CONFIG, optimizer="muon", fallback_optimizer="lion")
    rule = build_optimizer(module, config, {"3.weight", "3.bias"}, discriminative=True)
    rules = {
        name: type(one).__name__
        for one in rules_of(rule)
        for group in one.param_groups
        for name, parameter in module.named_parameters()
        if any(parameter is member for member in group["params"])
    }
    assert [name for name, rule in rules.items() if rule == "Muon"] == ["1.weight"]
    assert rules["0.weight"] == rules["3.weight"] == rules["3.bias"] == rules["1.bias"] == "Lion"


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_a_step_that_is_not_finite_leaves_no_trace(name):
    """Also if it is the first of all, for which some rules have another formula."""
    results = []
    for poisoned in ((), (0, 2)):
        module, rule = make(name)
        setup = EngineSetup(module, rule, plan_of("ddp", 1), "fp32", ALONE, batch_size=8, gradient_clipping=1.0)
        engine = build_engine(setup)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(8, 4, 3, 3, generator=generator)
            if step in poisoned:
                images[0, 0, 0, 0] = torch.nan
            elif step in (0, 2):
                continue
            engine.backward(engine.forward(images).square().mean())
            assert bool(engine.step().applied) == (step not in poisoned)
        assert engine.state().applied_steps == 2
        results.append([parameter.detach().clone() for parameter in module.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_what_is_sound_is_allowed():
    for name in ELEMENT_WISE:
        for strategy in STRATEGIES:
            check_config(dataclasses.replace(CONFIG, optimizer=name, strategy=strategy), FLAG_OF)
    for name in WHOLE_PARAMETER:
        check_config(dataclasses.replace(CONFIG, optimizer=name, engine="torch"), FLAG_OF)
    finetuned = dataclasses.replace(CONFIG, model_type="mobilenet_finetuned", optimizer="madgrad", head_epochs=0)
    check_config(finetuned, FLAG_OF)
    muon = dataclasses.replace(CONFIG, optimizer="muon", fallback_optimizer="sgd::momentum=0")
    check_config(muon, FLAG_OF)
    check_config(dataclasses.replace(muon, optimizer_options="momentum=0.9", momentum=0.0), FLAG_OF)


def test_options_reach_the_rule_that_they_are_for():
    _, rule = make("rmsproptf", optimizer_options="eps=0.001,alpha=0.95,centered=true")
    group = rule.param_groups[0]
    assert (group["eps"], group["alpha"], group["centered"], group["momentum"]) == (0.001, 0.95, True, 0.9)
    assert moment_kinds(rule) == ("square_avg", "momentum_buffer", "grad_avg")
    _, rule = make(
        "muon",
        optimizer_options="momentum=0.6,nesterov=true,ns_steps=3",
        fallback_optimizer="sgd::momentum=0.85",
    )
    matrices, vectors = rule.param_groups
    assert (matrices["momentum"], matrices["nesterov"], matrices["ns_steps"]) == (0.6, True, 3)
    assert (vectors["momentum"], vectors["nesterov"]) == (0.85, True)
    _, rule = make("lamb", optimizer_options="betas=0.8/0.95")
    assert rule.param_groups[0]["betas"] == (0.8, 0.95)


@pytest.mark.parametrize(("precision", "name"), [("fp32", "Fp32Muon"), ("bf16", "Muon")])
def test_a_runs_muon_has_the_precision_that_auto_became(precision, name):
    config = TrainConfig(model_type="basic_cnn", optimizer="muon", precision="auto")
    built = new_model("basic_cnn", num_classes=10, image_size=8)
    setup, _ = set_up_engine(config, built, precision, ALONE, compiles=False)
    assert type(rules_of(setup.optimizer)[0]).__name__ == name
