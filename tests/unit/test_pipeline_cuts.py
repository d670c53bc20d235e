"""Where networks can be cut, how stages are balanced, and how what goes between them lies in memory."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import pytest
import timm
import torch
from torch import nn

from zerovision.models.dry_run import without_data
from zerovision.training.base.errors import UserError
from zerovision.training.config import TrainConfig
from zerovision.training.engines.activation_checkpointing import enable_activation_checkpointing
from zerovision.training.engines.buckets import deal
from zerovision.training.engines.pipeline import Pipeline
from zerovision.training.engines.pipeline.rehearsal import layout_of
from zerovision.training.engines.pipeline.stages import balanced_cuts, places_for, places_to_cut, trace

SIZE = 32  # pixels
# Of timm's networks: blocks where they can be cut, and modules inside of blocks where they cannot.
NETWORKS = {
    "resnet18": (("layer1.1", "layer4", "fc"), ("layer1.1.conv2", "layer2.0.downsample")),
    "vit_tiny_patch16_224": (("blocks", "blocks.7", "norm", "head"), ("blocks.7.norm1", "blocks.7.mlp", "pos_drop")),
    "convnext_atto": (("stages.1", "stages.2.blocks.3", "head"), ("stages.2.blocks.3.mlp",)),
    "mobilenetv3_small_100": (("blocks.1", "blocks.4.1", "classifier"), ("blocks.4.1.conv_pw",)),
    "efficientnet_b0": (("blocks.1", "blocks.6.0", "classifier"), ("blocks.4.1.conv_pw",)),
    "vgg11_bn": (("features.4", "features.11", "pre_logits", "head"), ("features",)),
}


class Between(nn.Module):
    """A chain with a shared layer, one path that leaves it and comes back, and one layer that gets two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.inner, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.pair = nn.Bilinear(4, 4, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.shared(self.first(images.mean((2, 3)).repeat(1, 2)[:, :4]))
        around = features + self.inner(features)
        both = self.pair(around, features)
        return self.last(self.shared(both))


def cut(module: nn.Module, size: int = SIZE):
    return trace(without_data(module), (2, 3, size, size))


@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_can_be_cut_and_what_is_inside_them_cannot(name):
    can, cannot = NETWORKS[name]
    options = {"img_size": SIZE} if name.startswith("vit") else {}
    traced = cut(timm.create_model(name, num_classes=10, **options))
    assert [place for place in can if place not in traced.features] == []
    assert [place for place in cannot if place in traced.features] == []


def test_a_cut_has_one_tensor_and_no_weight_on_both_sides():
    # All between the two is on a path around another layer, or between two uses of one weight.
    assert places_to_cut(cut(Between(), 4)) == ["first", "last"]
    chain = nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.Identity(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert places_to_cut(cut(chain, 4)) == ["1", "3", "4", "5"]


def test_recomputed_blocks_are_whole():
    module = timm.create_model("mobilenetv3_small_100", num_classes=10)
    enable_activation_checkpointing(module)
    places = places_to_cut(cut(module))
    assert "blocks.1" in places
    assert [place for place in places if place.startswith("blocks.") and place.count(".") > 1] == []


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_balanced_stages_are_the_best_of_all(stages):
    costs = torch.rand(9, generator=torch.Generator().manual_seed(stages)).tolist()
    places = [f"block{number}" for number in range(1, 9)]

    def worst(cuts) -> float:
        bounds = [0, *(int(name.removeprefix("block")) for name in cuts), len(costs)]
        return max(sum(costs[low:high]) for low, high in pairwise(bounds))

    best = min(worst(cuts) for cuts in combinations(places, stages - 1))
    cuts = balanced_cuts(places, costs, stages)
    assert len(cuts) == stages - 1
    assert worst(cuts) == pytest.approx(best)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_members_are_dealt_out_evenly(ranks):
    costs = [3.0, 3.0, 2.0, 2.0, 2.0]
    dealt = deal(dict(enumerate(costs)), ranks)
    assert sorted(number for members in dealt for number in members) == [0, 1, 2, 3, 4]
    best = min(
        max(sum(cost for cost, at in zip(costs, places, strict=True) if at == rank) for rank in range(ranks))
        for places in product(range(ranks), repeat=len(costs))
    )
    assert max(sum(costs[number] for number in members) for members in dealt) <= best * 4 / 3
    assert all(dealt)


LAID_OUT = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "a mean's gradient": lambda t: t[:, :, :1, :1].expand(2, 3, 4, 5),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_a_tensor_lies_as_before_after_it_was_sent(name):
    tensor = LAID_OUT[name](torch.randn(2, 3, 4, 5))
    layout = layout_of(tensor)
    row = layout.pack(tensor)
    assert (row.is_contiguous(), row.shape) == (True, (120,))
    back = layout.unpack(row, tensor.shape)
    assert back.equal(tensor)
    assert back.stride() == tensor.stride()


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "words"),
    [
        ("1f1b", 2, 2, None),
        ("1f1b", 4, 3, "--gradient-accumulation-steps 4"),
        ("interleaved", 2, 6, None),
        ("interleaved", 2, 1, "--gradient-accumulation-steps 2"),
        ("interleaved", 3, 7, "--gradient-accumulation-steps 6 or 9"),
    ],
)
def test_micro_batches_fill_the_schedule(schedule, stages, micro_batches, words):
    cut = {"pipeline_schedule": schedule, "pipeline_parallel": stages, "gradient_accumulation_steps": micro_batches}
    if words is None:
        Pipeline(TrainConfig(**cut)).check_micro_batches()
        return
    with pytest.raises(UserError, match=words):
        Pipeline(TrainConfig(**cut)).check_micro_batches()


def test_more_stages_than_places_are_refused():
    chain = nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.Linear(4, 4))
    with pytest.raises(UserError, match="3 or fewer"):
        places_for(cut(chain, 4), 4, 4)
