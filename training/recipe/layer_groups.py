"""Which parameters decay, and learning rates that fall layer by layer towards the input: by timm's rules."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from models.ensemble import Ensemble
from training.base.errors import UserError
from training.recipe.settings import RecipeSettings


class ParameterSettings(NamedTuple):
    """Whether a parameter has weight decay, and the factor on its learning rate."""

    decays: bool
    rate_scale: float


def parameter_settings(module: nn.Module, config: RecipeSettings) -> dict[str, ParameterSettings]:
    """Return the settings of every parameter that is trained, by name.

    Biases and norm weights are vectors: decaying them only hurts (Goyal et al. 2017, https://arxiv.org/abs/1706.02677,
    section 3). With `--no-weight-decay model` those that a timm model's `no_weight_decay` names do not decay either.
    With `--layer-decay` a layer's rate is that of the next one, towards the head, times the decay (Bao et al. 2021,
    https://arxiv.org/abs/2106.08254, appendix); the layers are timm's, see `timm.optim.param_groups_layer_decay`.

    Raises:
        UserError: for a layer decay of a model of which one layer is trained, or that timm does not divide into layers.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if config.layer_decay == 1 and config.no_weight_decay == "vectors":
        return {name: ParameterSettings(parameter.ndim > 1, 1.0) for name, parameter in trained.items()}
    from timm.optim import param_groups_layer_decay

    by_id: dict[int, ParameterSettings] = {}
    for part in module.members if isinstance(module, Ensemble) else [module]:
        spared: Any = getattr(part, "no_weight_decay", set) if config.no_weight_decay == "model" else set
        groups = param_groups_layer_decay(
            part,
            weight_decay=1.0,
            no_weight_decay_list=spared(),
            layer_decay=config.layer_decay,
        )
        if config.layer_decay < 1 and len({group["lr_scale"] for group in groups}) == 1:
            raise UserError(
                f"--layer-decay {config.layer_decay}: what is trained of {type(part).__name__} is one layer: "
                "leave it out."
            )
        for group in groups:
            settings = ParameterSettings(group["weight_decay"] > 0, group["lr_scale"])
            by_id |= {id(parameter): settings for parameter in group["params"]}
    return {name: by_id[id(parameter)] for name, parameter in trained.items()}
