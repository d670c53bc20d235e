"""Grad-CAM: against CAM in closed form, and on every kind of network."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from tests.kit import assert_equal, assert_same_but_rounding, new_model
from zerovision.delivery.activation_map import activation_maps, picture_of
from zerovision.models.ensemble import Ensemble
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.errors import UserError

SIZE, CLASSES = 64, 5


class PooledCNN(nn.Module):
    """A convolution, the mean over places, a linear layer: Grad-CAM is CAM here (section 3.1 of the paper)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.Linear(8, CLASSES)

    def forward(self, images):
        return self.head(self.convolution(images).mean((2, 3)))


def cam(network, images, classes):
    """Class activation maps (Zhou et al. 2016): features weighted by the class's own row of the last layer."""
    features = network.convolution(images)
    maps = torch.einsum("bchw,bc->bhw", features, network.head.weight[classes]).relu()
    maps = F.interpolate((maps / maps.amax((1, 2), keepdim=True))[:, None], (SIZE, SIZE), mode="bilinear")[:, 0]
    return maps / maps.amax((1, 2), keepdim=True)


@pytest.mark.parametrize("members", [1, 2])
def test_of_a_pooled_cnn_it_is_cam(members):
    torch.manual_seed(0)
    networks = [PooledCNN() for _ in range(members)]
    images, classes = torch.randn(3, 3, SIZE, SIZE), torch.tensor([0, 4, 2])
    with torch.no_grad():
        network = networks[0] if members == 1 else Ensemble(networks).eval()
        found = activation_maps(network, images, classes)
        if members == 1:
            assert_same_but_rounding(found, cam(network, images, classes))
        else:
            assert not torch.equal(found, activation_maps(networks[0], images, classes))
    assert found.amax((1, 2)).tolist() == pytest.approx([1, 1, 1])
    assert all(not module._forward_hooks for module in network.modules())


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_of_a_vision_transformer_it_is_attention_rollout(pool):
    """Abnar & Zuidema 2020, section 3: the product of (A + I) / 2 over the layers, from its closed form."""
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", img_size=(64, 96), num_classes=CLASSES, global_pool=pool).eval()
    for block in network.blocks:  # attention that is not even
        block.attn.qkv.weight.data *= 15
    images, rollout = torch.randn(2, 3, 64, 96), torch.eye(25)
    with torch.no_grad():
        tokens = network.norm_pre(network._pos_embed(network.patch_embed(images)))
        for block in network.blocks:
            queries, keys, _ = block.attn.qkv(block.norm1(tokens)).reshape(2, 25, 3, 3, 64).permute(2, 0, 3, 1, 4)
            attention = (queries @ keys.transpose(2, 3) / 8).softmax(dim=3).mean(dim=1)
            rollout = (0.5 * attention + 0.5 * torch.eye(25)) @ rollout
            tokens = block(tokens)
        logits = network(images)
        maps = (rollout[:, 0, 1:] if pool == "token" else rollout[:, 1:, 1:].mean(dim=1)).reshape(2, 1, 4, 6)
        maps = F.interpolate(maps, (64, 96), mode="bilinear")[:, 0]
        found = activation_maps(network, images, torch.tensor([0, 1]))
        torch.testing.assert_close(found, maps / maps.amax((1, 2), keepdim=True), rtol=1e-3, atol=1e-4)
        assert found.std() > 0.05
        assert torch.equal(network(images), logits)
    assert all(block.attn.fused_attn and not block.attn.attn_drop._forward_pre_hooks for block in network.blocks)


MODELS = ["basic_cnn", "cnn_lstm", "timm:vit_tiny_patch16_224", "timm:swin_tiny_patch4_window7_224", "timm:resnet10t"]


@pytest.mark.parametrize("model", MODELS)
def test_maps_of_networks(model):
    """Each has a map in 0..1 that is not flat, and is left as it was."""
    torch.manual_seed(0)
    module = new_model(model, num_classes=CLASSES, image_size=f"{SIZE}x{2 * SIZE}").module.eval()
    images = torch.randn(2, 3, SIZE, 2 * SIZE)
    before = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        maps = activation_maps(module, images, torch.tensor([1, 3]))
    assert maps.shape == (2, SIZE, 2 * SIZE)
    assert 0 <= maps.min() <= maps.max() <= 1
    assert maps.std() > 0
    assert_equal(module.state_dict(), before)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_network_without_places_is_refused():
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, CLASSES))
    with pytest.raises(UserError, match="no spatial feature map"):
        activation_maps(network, torch.randn(1, 3, SIZE, SIZE), torch.tensor([0]))


def test_a_picture_is_dark_where_nothing_counted():
    preprocessing = Preprocessing(4, None, mean=(0.5,) * 3, std=(0.25,) * 3)
    importance = torch.zeros(4, 4)
    importance[0, 0] = 1
    picture = picture_of(torch.zeros(3, 4, 4), importance, preprocessing)
    assert (picture.getpixel((0, 0)), picture.getpixel((3, 3))) == ((128,) * 3, (32,) * 3)
