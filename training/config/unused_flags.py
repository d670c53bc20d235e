"""Flags that were given and change nothing, because another one that they belong to was not."""

from __future__ import annotations

from collections.abc import Callable

from models import model_spec
from training.config import FIELDS, FLAG_OF, TrainConfig
from training.data.augmentations import augmentation_of
from training.recipe.rules import MATRIX_RULES, read_options
from training.recipe.schedule import has_slow_backbone, schedule_names


def _has_schedule(*names: str) -> Callable[[TrainConfig], bool]:
    return lambda config: not schedule_names(config).isdisjoint(names)


def _has_fallback(config: TrainConfig) -> bool:
    return config.optimizer in MATRIX_RULES


def _mixes(config: TrainConfig) -> bool:
    """Return whether images are mixed: those of a micro-batch, with each other."""
    return config.batch_size != 1 and bool(config.mixup or config.cutmix)


def _falls(config: TrainConfig) -> bool:
    """Return whether a rate has a final value that it reaches by its schedule's shape."""
    return not schedule_names(config) <= {"step", "constant"}


def _shifts(config: TrainConfig) -> bool:
    if config.augmentation == "auto":
        return config.shift_pixels != 0
    return augmentation_of(config, config.augmentation).shift


def _has_momentum(config: TrainConfig) -> bool:
    from timm.optim import get_optimizer_info

    rules = {config.optimizer: config.optimizer_options}
    if _has_fallback(config):
        rules[config.fallback_optimizer] = config.fallback_options
    return any(
        get_optimizer_info(rule).has_momentum and "momentum" not in read_options("", options)
        for rule, options in rules.items()
    )


# When each flag has an effect.
USED: dict[str, Callable[[TrainConfig], bool]] = {
    "fold": lambda config: config.folds > 0,
    "shuffle_window": lambda config: config.order == "shards",
    "val_fraction": lambda config: not config.folds,
    "eval_crop": lambda config: config.fit in ("auto", "crop"),
    "momentum": _has_momentum,
    **dict.fromkeys(("milestones", "decay_rate"), _has_schedule("step")),
    "decay_epochs": lambda config: _has_schedule("wsd" if config.milestones else "step", "wsd")(config),
    **dict.fromkeys(("final_learning_rate_scale", "cooldown_epochs"), _falls),
    "decay_shape": _has_schedule("wsd"),
    "decay_power": _has_schedule("polynomial"),
    **dict.fromkeys(("fallback_optimizer", "fallback_options", "fallback_schedule"), _has_fallback),
    "fallback_learning_rate_scale": _has_fallback,
    **dict.fromkeys(("head_epochs", "backbone_learning_rate_scale"), has_slow_backbone),
    "ensemble_members": lambda config: model_spec(config.model_type).takes_members,
    **dict.fromkeys(("mixup", "cutmix", "mixup_probability", "mixup_off_epochs"), _mixes),
    "mixup_switch_probability": lambda config: _mixes(config) and bool(config.mixup and config.cutmix),
    "random_erasing_mode": lambda config: config.random_erasing > 0,
    "shift_padding": _shifts,
    **dict.fromkeys(("pipeline_schedule", "pipeline_split"), lambda config: config.has_stages),
    **dict.fromkeys(("epochs", "learning_rate", "optimizer", "schedule"), lambda config: config.solver == "steps"),
    "temperature": lambda config: config.is_contrastive,
    **dict.fromkeys(
        ("islands", "outer_learning_rate", "outer_momentum", "outer_precision"), lambda config: config.has_islands
    ),
}


def note_unused_flags(config: TrainConfig) -> list[str]:
    """Return a note for the log that names the flags whose values change nothing in this run."""
    given = [name for name, field in FIELDS.items() if getattr(config, name) != field.default]
    unused = [FLAG_OF[name] for name in given if name in USED and not USED[name](config)]
    return [f"without effect in this run: {', '.join(unused)}"] if unused else []
