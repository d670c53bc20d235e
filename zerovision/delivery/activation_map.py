"""Shows which parts of an image led to a class, using Grad-CAM (Selvaraju et al. 2017, arXiv:1610.02391) or rollout.

Attention rollout (Abnar & Zuidema 2020, arXiv:2005.00928) shows what a vision transformer attends to, regardless of the
class.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.errors import UserError
from zerovision.training.data.augment import evaluation_transform, unnormalized, viewable
from zerovision.training.data.reading.image_numbers import BYTES

Explain = Callable[[Sequence[torch.Tensor], Sequence[int]], list[Image.Image]]

DARKEST = 0.25  # fraction of the brightness that remains in parts of an image that did not contribute


def activation_maps(network: nn.Module, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Return how much each position of each image contributed to a class, relative to the largest contribution (1).

    The map is computed by Grad-CAM (equations 1 and 2 of the paper) from the last feature map with more than one
    position. For a vision transformer, the map is the attention rollout; if the network's attention is of a different
    kind, Grad-CAM is applied to the patches that enter the last block, which outputs only the class token. For an
    ensemble, the map is the mean over the members. If nothing in an image contributed to the class, the map is 0
    everywhere.

    Args:
        network: network in evaluation mode that maps float32 [B, C, H, W] to logits [B, classes].
        images: float32 [B, C, H, W], preprocessed for the network.
        classes: int64 [B], the class to explain for each image.

    Returns:
        float32 [B, H, W] in 0..1.

    Raises:
        UserError: if the network has no feature map with more than one position.
    """
    maps = torch.zeros(())
    for member in getattr(network, "members", [network]):
        rollout = _rollout(member, images)
        maps = maps + (_grad_cam(member, images, classes) if rollout is None else rollout)
    maps = F.interpolate(maps[:, None], images.shape[2:], mode="bilinear", align_corners=False)[:, 0]
    return maps / maps.amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(maps.dtype).tiny)


def picture_of(image: torch.Tensor, importance: torch.Tensor, preprocessing: Preprocessing) -> Image.Image:
    """Return an image as the network saw it, darkened where it contributed less to the class.

    `image` is normalized, float32 [C, H, W], and `importance` is float32 [H, W] in 0..1. The preprocessing must be for
    8-bit images.
    """
    shown = viewable(unnormalized(image, preprocessing).clamp(0, 1)) * (DARKEST + (1 - DARKEST) * importance)
    pixels = (255 * shown).round().byte().expand(3, -1, -1)
    return Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())


def explainer(network: nn.Module, preprocessing: Preprocessing) -> Explain | None:
    """Return a function that applies `picture_of` to raw images [C, H, W], given one class per image.

    Return None if the network does not take 8-bit images, because other images cannot be shown as pictures.
    """
    if preprocessing.values != BYTES:
        return None
    transform = evaluation_transform(preprocessing)

    def explain(images: Sequence[torch.Tensor], classes: Sequence[int]) -> list[Image.Image]:
        seen = torch.stack([transform(image) for image in images]).contiguous(memory_format=torch.channels_last)
        device = next(network.parameters()).device
        maps = activation_maps(network, seen.to(device), torch.tensor(classes, device=device)).cpu()
        return [picture_of(image, one, preprocessing) for image, one in zip(seen, maps, strict=True)]

    return explain


@torch.no_grad()
def _rollout(network: nn.Module, images: torch.Tensor) -> torch.Tensor | None:
    """Return the attention rollout, float32 [B, h, w] with a maximum of 1; None if this is not a vision transformer.

    As in section 3 of the paper, the blocks' attention matrices are multiplied. The rollout is the class token's row of
    the product, or the mean of the rows if the network averages the patches.
    """
    layers: list[Any] = [getattr(block, "attn", None) for block in getattr(network, "blocks", ())]
    if not layers or not all(hasattr(layer, "fused_attn") and hasattr(layer, "attn_drop") for layer in layers):
        return None
    flow: list[torch.Tensor] = []

    def follow(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        attention = inputs[0].float().mean(dim=1)  # [B, N, N], the mean of the heads
        mixed = (attention + torch.eye(attention.shape[-1], device=attention.device)) / 2  # the residual connection
        flow[:] = [mixed @ flow[0] if flow else mixed]

    with contextlib.ExitStack() as changes:
        for layer in layers:
            changes.enter_context(layer.attn_drop.register_forward_pre_hook(follow))
            # Fused attention does not expose its matrix.
            changes.enter_context(mock.patch.object(layer, "fused_attn", False))
        network(images)
    prefix = getattr(network, "num_prefix_tokens", 0)
    grid = getattr(getattr(network, "patch_embed", None), "grid_size", None) or ()
    if not flow or flow[0].shape != (len(images), *2 * (prefix + math.prod(grid),)):  # for example, windowed attention
        return None
    has_token = getattr(network, "global_pool", "") == "token" and prefix
    row = flow[0][:, 0] if has_token else flow[0][:, prefix:].mean(dim=1)
    maps = _as_map(network, row[:, :, None])[:, 0]
    return maps / maps.amax(dim=(1, 2), keepdim=True)


def _grad_cam(network: nn.Module, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Return the Grad-CAM map at the resolution of the features, float32 [B, h, w] with a maximum of 1.

    The features are the tokens [B, N, C] that enter the last block, or otherwise the last feature map.
    """
    maps: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []

    def keep_map(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.ndim == 4 and min(_as_map(network, output).shape[2:]) > 1:
            maps.append(output)

    def keep_tokens(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(inputs[0], torch.Tensor) and inputs[0].ndim == 3:
            tokens.append(inputs[0])

    blocks = getattr(network, "blocks", None)
    with torch.enable_grad(), contextlib.ExitStack() as hooks:
        for module in network.modules():
            hooks.enter_context(module.register_forward_hook(keep_map))
        if isinstance(blocks, nn.Sequential | nn.ModuleList):
            hooks.enter_context(blocks[-1].register_forward_pre_hook(keep_tokens))
        logits = network(images)
        found = [*maps, *tokens]
        if not found:
            raise UserError("this network has no spatial feature map, so its predictions cannot be explained.")
        (gradients,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), found[-1])
    features, gradients = (_as_map(network, values.detach().float()) for values in (found[-1], gradients))
    heat = (gradients.mean(dim=(2, 3), keepdim=True) * features).sum(1).relu()
    return heat / heat.amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(heat.dtype).tiny)


def _as_map(network: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """Return features as [B, C, h, w], arranging patch tokens in the grid of the patches."""
    if features.ndim == 4:
        return features.permute(0, 3, 1, 2) if getattr(network, "output_fmt", "NCHW") == "NHWC" else features
    patches = features[:, getattr(network, "num_prefix_tokens", 0) :].transpose(1, 2)
    side = math.isqrt(patches.shape[2])
    grid = getattr(getattr(network, "patch_embed", None), "grid_size", None) or (side, side)
    if math.prod(grid) != patches.shape[2]:
        raise UserError("the grid of this network's patches is not known, so its predictions cannot be explained.")
    return patches.unflatten(2, grid)
