"""Finds the layers that several ranks can divide, so that each computes a part of every layer (tensor parallelism).

A region begins with matrices whose outputs are divided among the ranks, and ends with a matrix whose inputs are
divided. In between, each rank computes some of the heads or hidden features, and the ranks' results are summed only
once (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from zerovision.training.base.errors import UserError


@dataclass(frozen=True)
class Region:
    """How to divide a kind of layer.

    Attributes:
        first: parameters, or modules with all their parameters, whose outputs are divided; maps their names to the
            number of blocks of outputs to divide separately, which is 3 if queries, keys and values are one matrix.
        last: name of the module whose inputs are divided.
        heads: name of the attribute with the number of heads, each of which stays whole; '' if features can be divided
            anywhere.
        counts: names of other attributes to set to a rank's share.
        dropout: name of a dropout module between `first` and `last`.
    """

    first: Mapping[str, int]
    last: str
    heads: str = ""
    counts: tuple[str, ...] = ()
    dropout: str = ""


_OF_HEADS = {"qkv": 3, **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_bias", "v_bias", "gate"), 1)}
_ATTENTION = Region(_OF_HEADS, "proj", heads="num_heads", counts=("num_kv_heads", "attn_dim", "kv_dim"))
_MLP = Region({"fc1": 1}, "fc2", dropout="drop1")
# By the name of a network's class in timm, and then by the name of the class of a layer in the network.
TENSOR_PLANS: dict[str, dict[str, Region]] = {
    "VisionTransformer": {  # also DeiT
        "Attention": _ATTENTION,
        "Mlp": _MLP,
        "GluMlp": Region({"fc1": 2}, "fc2", dropout="drop1"),
        "SwiGLU": Region({"fc1_g": 1, "fc1_x": 1}, "fc2", dropout="drop1"),
    },
    "ConvNeXt": {"Mlp": _MLP},
    "MlpMixer": {"Mlp": _MLP},
    "VGG": {"ConvMlp": Region({"fc1": 1}, "fc2", dropout="drop")},
}
TENSOR_PLANS["Eva"] = TENSOR_PLANS["VisionTransformer"] | {"EvaAttention": _ATTENTION, "AttentionRope": _ATTENTION}
WIDE_HEAD = 2**20  # number of classifier weights from which exchanging the outputs pays off


class TensorPlan(NamedTuple):
    """The divided parts of a network.

    Attributes:
        regions: how each region is divided, and its number of heads or features, by module name.
        head: the name of the classifier if its outputs are divided and then gathered; '' if it stays whole.
    """

    regions: dict[str, tuple[Region, int]]
    head: str


def tensor_plan(module: nn.Module, model_type: str, ranks: int) -> TensorPlan:
    """Return the parts of a network that `ranks` ranks can divide among themselves.

    A region that contains other weights, such as a norm over all heads, is not divided.

    Args:
        module: the network.
        model_type: name of the model, for messages.
        ranks: number of ranks that divide the network.

    Raises:
        UserError: if the network has nothing to divide, or fewer heads than ranks.
    """
    kinds = next((TENSOR_PLANS[name.__name__] for name in type(module).__mro__ if name.__name__ in TENSOR_PLANS), {})
    regions = {}
    for place, layer in module.named_modules():
        region = kinds.get(type(layer).__name__)
        if region is not None and _is_divisible(layer, region):
            units = getattr(layer, region.heads) if region.heads else layer.get_submodule(region.last).weight.shape[1]
            regions[place] = region, units
    if not regions:
        raise UserError(
            f"--tensor-parallel {ranks}: {model_type} has no layers that can be divided, unlike networks of timm's "
            f"classes {', '.join(sorted(TENSOR_PLANS))}: leave it out, and use --strategy fsdp_stage3."
        )
    fewest = min(units for _, units in regions.values())
    if fewest < ranks:
        raise UserError(
            f"--tensor-parallel {ranks}: {model_type} has layers of {fewest} heads, which cannot be split: "
            f"use --tensor-parallel {fewest} or less."
        )
    name: Any = getattr(module, "default_cfg", {}).get("classifier")
    head = module.get_submodule(name) if isinstance(name, str) else None
    is_wide = isinstance(head, nn.Linear) and head.weight.numel() >= WIDE_HEAD and head.out_features % ranks == 0
    return TensorPlan(regions, name if is_wide else "")


def _is_divisible(layer: nn.Module, region: Region) -> bool:
    """Return whether everything in a layer can be divided: no norm over its features, no dropout in its heads."""
    divided, last = (*region.first, region.last), layer.get_submodule(region.last)
    is_matrix = isinstance(last, nn.Linear) or (isinstance(last, nn.Conv2d) and last.kernel_size == (1, 1))
    has_others = any(name.partition(".")[0] not in divided for name, _ in layer.named_parameters())
    has_norm = not isinstance(getattr(layer, "norm", nn.Identity()), nn.Identity)
    shares_keys = getattr(layer, "num_kv_groups", 1) > 1
    drops_keys = getattr(getattr(layer, "attn_drop", None), "p", 0) > 0
    return is_matrix and not (has_others or has_norm or shares_keys or drops_keys)
