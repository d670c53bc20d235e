"""Weight decay and learning rate of each parameter, against timm's own optimizer of the same model."""

from __future__ import annotations

import dataclasses

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from zerovision.models.basic_cnn import BasicCNN
from zerovision.models.ensemble import Ensemble
from zerovision.training.base.errors import UserError
from zerovision.training.config import TrainConfig
from zerovision.training.recipe.optimizer import build_optimizer

CONFIG = TrainConfig(learning_rate=0.1, weight_decay=0.3)
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
    config = dataclasses.replace(CONFIG, **changes)
    return settings_of(module, build_optimizer(module, config, [], discriminative=False), "rate_scale")


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
        with pytest.raises(UserError, match=r"^--layer-decay 0.75: what is trained of \w+ is one layer") as caught:
            ours(model, layer_decay=0.75)
        assert "\n" not in str(caught.value)
    assert ours(BasicCNN(5, 3), no_weight_decay="model") == ours(BasicCNN(5, 3))


def test_the_blocks_of_our_own_models_are_layers():
    scales = {name: scale for name, (_, scale) in ours(BasicCNN(5, 3), layer_decay=0.5).items()}
    assert [scales[f"blocks.{block}.0.weight"] for block in range(3)] == [0.125, 0.25, 0.5]
    assert scales["head.weight"] == 1


def test_frozen_parameters_are_in_no_group():
    module = make_model(VIT)
    module.patch_embed.requires_grad_(False)
    assert not any(name.startswith("patch_embed") for name in ours(module, layer_decay=0.75))
