"""Parameter groups, the optimizer (which may combine several rules), and the optimizer state that all engines use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from timm.optim import muon
from torch import nn

from zerovision.models.ensemble import Ensemble
from zerovision.training.base.errors import UserError, one_line
from zerovision.training.recipe.rules import MATRIX_RULES, OPTION_READERS, WHOLE_PARAMETER, read_fallback, read_options
from zerovision.training.recipe.settings import RecipeSettings


class Composite(torch.optim.Optimizer):
    """Combines several optimizers into one, which shares their groups and state."""

    def __init__(self, rules: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for rule in rules for group in rule.param_groups], {})
        self.rules = rules  # an engine that replaces a group's parameters also replaces them in the group's rule
        for rule in rules:
            rule.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for rule in self.rules:
            rule.step()


def rules_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the rules of a composite optimizer; for any other optimizer, return a list that contains only it."""
    return optimizer.rules if isinstance(optimizer, Composite) else [optimizer]


class Fp32Muon(muon.Muon):
    """timm's Muon with Newton-Schulz iterations in fp32 instead of bf16.

    On a CPU without bf16 instructions (AMD EPYC, family 25, model 1), bf16 takes 27 times as long (for `airbench`).
    """

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update all parameters; timm has no option for the iterations' dtype."""
        in_fp32 = functools.partial(muon.zeropower_via_newtonschulz, dtype=torch.float32)
        with mock.patch.object(muon, "zeropower_via_newtonschulz", in_fp32):
            return super().step(closure)


# Options of timm's rules, in addition to the learning rate, the weight decay and the momentum.
OPTIONS: dict[str, dict[str, Any]] = {
    # One pass over each flat tensor: a step takes 0.87 times as long as with PyTorch's default.
    **{name: {"fused": True} for name in ("adam", "adamw", "sgd", "momentum", "nesterov")},
    # The engine clips gradients.
    "lamb": {"max_grad_norm": None},
}
# How to initialize state that does not start as zeros, by the rule's class and the kind of state.
STARTS = {("RMSpropTF", "square_avg"): torch.ones_like, ("MADGRAD", "x0"): torch.clone}

AVERAGES = "averages"  # key of a parameter group: names of the averages of its weights in the optimizer's state


class ParameterSettings(NamedTuple):
    """Whether weight decay applies to a parameter, and the factor on the parameter's learning rate."""

    decays: bool
    rate_scale: float


def parameter_settings(module: nn.Module, config: RecipeSettings) -> dict[str, ParameterSettings]:
    """Return the settings of every trained parameter, by name, or raise a UserError.

    Vectors (biases and norm weights) have no weight decay, which would only hurt (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, section 3). With `--no-weight-decay model`, parameters named in a timm model's
    `no_weight_decay` have no weight decay either. With `--layer-decay`, a layer's learning rate is that of the next
    layer toward the head, times the layer decay (Bao et al. 2021, https://arxiv.org/abs/2106.08254, appendix). The
    layers are those of `timm.optim.param_groups_layer_decay`.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if config.layer_decay == 1 and config.no_weight_decay == "vectors":
        return {name: ParameterSettings(parameter.ndim > 1, 1.0) for name, parameter in trained.items()}
    from timm.optim import param_groups_layer_decay

    by_id: dict[int, ParameterSettings] = {}
    for part in module.members if isinstance(module, Ensemble) else [module]:
        spared: Any = getattr(part, "no_weight_decay", set) if config.no_weight_decay == "model" else set
        groups = param_groups_layer_decay(
            part, weight_decay=1.0, no_weight_decay_list=spared(), layer_decay=config.layer_decay
        )
        if config.layer_decay < 1 and len({group["lr_scale"] for group in groups}) == 1:
            raise UserError(
                f"--layer-decay {config.layer_decay}: only one layer of {type(part).__name__} is trained: leave it out."
            )
        for group in groups:
            settings = ParameterSettings(group["weight_decay"] > 0, group["lr_scale"])
            by_id |= {id(parameter): settings for parameter in group["params"]}
    return {name: by_id[id(parameter)] for name, parameter in trained.items()}


def build_optimizer(
    module: nn.Module, config: RecipeSettings, head_parameter_names: Collection[str], *, discriminative: bool
) -> torch.optim.Optimizer:
    """Build the optimizer with timm, with parameter groups by weight decay and learning rate.

    Each group contains 'rate_scale', the factor on the schedule's learning rate; 'is_backbone', whether the group is
    frozen while only the head is trained; and 'whole_parameters', whether the group's rule needs whole parameters.

    Args:
        module: the model.
        config: the run's configuration with resolved `precision`; with 'fp32', Muon also computes its products in fp32.
        head_parameter_names: names of the classifier's parameters.
        discriminative: whether the backbone's learning rate is `backbone_learning_rate_scale` times the head's.

    Raises:
        UserError: if the rule rejects a value or would update no parameter; see also `parameter_settings`.
    """
    assert config.learning_rate != "auto"  # already chosen
    settings, fallback = parameter_settings(module, config), read_fallback(config.fallback_optimizer)
    groups: dict[tuple[float, float, bool, str], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        decay = config.weight_decay if settings[name].decays else 0.0
        is_backbone, rule = discriminative and name not in head_parameter_names, config.optimizer
        scale = settings[name].rate_scale * (config.backbone_learning_rate_scale if is_backbone else 1.0)
        # Muon can update matrices and convolutions that are neither depthwise nor very narrow.
        if rule in MATRIX_RULES and (name in head_parameter_names or not muon._is_suitable_for_muon(parameter)):
            scale, rule = scale * fallback.rate_scale, fallback.name
        groups.setdefault((decay, scale, is_backbone, rule), []).append(parameter)
    by_rule: dict[str, list[dict[str, Any]]] = {}
    for (decay, scale, is_backbone, rule), parameters in groups.items():
        group = {"params": parameters, "weight_decay": decay, "lr": config.learning_rate * scale}
        group |= {"rate_scale": scale, "is_backbone": is_backbone}
        group["whole_parameters"] = rule in WHOLE_PARAMETER
        by_rule.setdefault(rule, []).append(group)
    if config.optimizer not in by_rule:
        raise UserError(
            f"--optimizer {config.optimizer}: it updates only matrices and convolutions (at least 4 by 4, one side at "
            f"most 128 times the other), and none is trained: use --optimizer {fallback.name}."
        )
    rules = [_build_rule(rule, param_groups, config) for rule, param_groups in by_rule.items()]
    return rules[0] if len(rules) == 1 else Composite(rules)


def _build_rule(name: str, param_groups: list[dict[str, Any]], config: RecipeSettings) -> torch.optim.Optimizer:
    from timm.optim import create_optimizer_v2, get_optimizer_class

    given = _given_options(name, config)
    assert config.learning_rate != "auto"  # already chosen
    is_fallback = name != config.optimizer
    # The groups have their own learning rates; corrected weight decays are relative to the peak rate.
    peak = config.learning_rate * (read_fallback(config.fallback_optimizer).rate_scale if is_fallback else 1)
    options = {"lr": peak, "weight_decay": config.weight_decay, **given}
    momentum = given.get("momentum", config.momentum)
    if name in MATRIX_RULES:
        param_groups = [{**group, "use_muon": True} for group in param_groups]
    # "momentum" is timm's name for SGD without Nesterov momentum; with Nesterov momentum, SGD rejects a momentum of 0.
    is_plain_sgd = name in ("sgd", "nesterov") and momentum == 0
    try:
        # timm passes the momentum only to the optimizers that have one.
        options = {"momentum": momentum} | OPTIONS.get(name, {}) | options
        if name in MATRIX_RULES and config.precision == "fp32":
            return Fp32Muon(param_groups, **getattr(get_optimizer_class(name), "keywords", {}) | options)
        return create_optimizer_v2(param_groups, opt="momentum" if is_plain_sgd else name, **options)
    except ValueError as error:
        flag = "--fallback-optimizer" if is_fallback else "--optimizer"
        cure = "" if momentum else f" Use {flag} sgd, or a momentum above 0."
        raise UserError(f"{flag} {name} with a momentum of {momentum}: {one_line(error)}.{cure}") from None


def _given_options(name: str, config: RecipeSettings) -> dict[str, Any]:
    """Return the options that the user gave for a rule, or raise a UserError."""
    from timm.optim import get_optimizer_class, get_optimizer_info

    flag, text = "--optimizer OPTIONS", config.optimizer_options
    if name != config.optimizer:
        flag, text = "--fallback-optimizer", read_fallback(config.fallback_optimizer).options
    options = read_options(flag, text)
    known = {*inspect.signature(get_optimizer_class(name, bind_defaults=False)).parameters}
    if name in MATRIX_RULES:
        known.remove("betas")  # the class has betas only for its built-in fallback rule
    for option in options:
        if option not in known:
            allowed = ", ".join(sorted(OPTION_READERS.keys() & known)) or "none"
            raise UserError(f"{flag}: {name} has no option {option!r}. Allowed: {allowed}.")
    betas = get_optimizer_info(name).num_betas
    if len(options.get("betas", range(betas))) != betas:
        raise UserError(f"{flag}: {name} needs {betas} values for betas.")
    return options


def moment_kinds(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the state tensors that the optimizer has for each weight: none for SGD without momentum.

    The names include those of averages of the weights; see `zerovision.training.steps.weight_average`.
    """
    created = [_created_state(rule, group) for rule in rules_of(optimizer) for group in rule.param_groups]
    moments = dict.fromkeys(kind for state in created for kind, value in state.items() if _is_moment(value))
    return (*moments, *optimizer.param_groups[0].get(AVERAGES, ()))


def moments_of(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the live state tensors of a weight by kind, limited to the kinds in `moment_kinds`."""
    state, kinds = optimizer.state[weight], moment_kinds(optimizer)
    return {kind: state[kind] for kind in kinds if kind in state}


def create_state(optimizer: torch.optim.Optimizer, weights: Iterable[torch.Tensor]) -> None:
    """Create the optimizer's state for weights before the first step, as the first step itself would.

    This gives every engine moments to save, and lets a fused optimizer skip its first step, after which SGD would
    otherwise use uninitialized memory as momentum.
    """
    groups = _groups(optimizer)
    for weight in weights:
        rule, group = groups(weight)
        # Fused kernels read the step count on the weights' device; other rules keep it on the CPU.
        place = weight.device if group.get("fused") else torch.device("cpu")
        state = optimizer.state[weight] = dict[str, Any]()
        for kind, created in _created_state(rule, group).items():
            if _is_moment(created):
                state[kind] = STARTS.get((type(rule).__name__, kind), torch.zeros_like)(weight.detach())
            else:
                state[kind] = created.to(place, copy=True) if isinstance(created, torch.Tensor) else created
    set_applied_steps(optimizer, 0)


@torch.no_grad()
def restart(optimizer: torch.optim.Optimizer) -> None:
    """Reset the state in place to what it was before the first step, except for the averages of the weights."""
    groups = _groups(optimizer)
    for weight, state in optimizer.state.items():
        rule, group = groups(weight)
        for kind, created in _created_state(rule, group).items():
            if (type(rule).__name__, kind) in STARTS:
                state[kind].copy_(STARTS[type(rule).__name__, kind](weight))
            elif _is_moment(created):
                state[kind].zero_()
    set_applied_steps(optimizer, 0)


def exchange_with(weights: torch.Tensor, state: dict[str, torch.Tensor], *, kind: str) -> None:
    """Swap the weights with the tensor of one kind in the optimizer's state."""
    kept = weights.clone()
    weights.copy_(state[kind])
    state[kind].copy_(kept)


def _groups(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Return a function that finds the rule and the group of a weight."""
    groups = [(rule, group) for rule in rules_of(optimizer) for group in rule.param_groups]
    group_of = {weight: pair for pair in groups for weight in pair[1]["params"]}
    return lambda weight: group_of.get(weight, groups[0])  # an engine may refill its groups in each step


def set_applied_steps(optimizer: torch.optim.Optimizer, applied_steps: int) -> None:
    """Set the number of updates, which bias corrections need, wherever the rules store it."""
    for place in (*optimizer.state.values(), *optimizer.param_groups):
        if isinstance(place.get("step"), torch.Tensor):
            place["step"].fill_(applied_steps)
        elif "step" in place:
            place["step"] = applied_steps


def _created_state(rule: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the state that a rule creates for a parameter in the first step, found once by a step on 2 x 2 zeros."""
    if "created_state" not in group:
        weight = nn.Parameter(torch.zeros(2, 2))
        weight.grad = torch.zeros(2, 2)
        settings = {name: value for name, value in group.items() if name not in ("params", "step")}
        trial = type(rule)([{**settings, "params": [weight]}])  # type: ignore[call-arg]
        trial.step()
        if "step" in trial.param_groups[0]:
            group["step"] = trial.param_groups[0]["step"]
        group["created_state"] = {kind: value for kind, value in trial.state[weight].items() if value is not None}
    return group["created_state"]


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == (2, 2)
