"""Checks a configuration: types, ranges, names, and contradictions."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from zerovision.models import check_model_name, model_spec
from zerovision.training.base.errors import UserError, check_name, either, shown
from zerovision.training.base.plugins import load_plugins
from zerovision.training.base.settings import Mode, Values
from zerovision.training.base.units import plural
from zerovision.training.config import FIELDS, FLAG_OF, MODES, TrainConfig
from zerovision.training.config.global_batch import in_chunks
from zerovision.training.config.values import allowed_values, is_allowed, wrong_value
from zerovision.training.data import bad_image_share, find_dataset
from zerovision.training.data.augmentations import augmentation_of, size_ramp
from zerovision.training.engines.settings import TOGETHER, TORCH, WAYS, ways_of
from zerovision.training.engines.ways import NOT_COMPILED, OF_CLASSES, OUR_ENGINE, STRATEGIES
from zerovision.training.observe.loggers import LOGGERS
from zerovision.training.observe.new_run import run_folder
from zerovision.training.recipe import read_tune
from zerovision.training.recipe.rules import MATRIX_RULES, SHIFTED_RATE, check_optimizer, read_fallback, read_options
from zerovision.training.recipe.schedule import given_decay, has_slow_backbone, head_epochs_of, schedule_fields
from zerovision.training.tasks.settings import LOSSES, TASKS, asked_task

OF_LAUNCHERS = ("auto",)  # strategies that a launcher replaces with a different one
LAUNCHED_STRATEGIES = (*STRATEGIES, *OF_LAUNCHERS)
RUN_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def check_launched(config: TrainConfig, label_of: Mapping[str, str]) -> TrainConfig:
    """Check the configuration of a launched run, whose launcher may choose the strategy; see `check_config`."""
    check_name("strategy", config.strategy, LAUNCHED_STRATEGIES)
    strategy = TrainConfig.strategy if config.strategy in OF_LAUNCHERS else config.strategy
    found = check_config(dataclasses.replace(config, strategy=strategy), label_of)
    return dataclasses.replace(found, strategy=config.strategy)


def _answer_of(mode: type[Mode], question: Callable[[Any], bool]) -> Callable[[TrainConfig], bool]:
    return lambda config: question(mode(config))


# For each setting: the condition under which it restricts other settings, and the values that they may have under this
# condition, the usual one first.
GOES_WITH: dict[str, tuple[Callable[[TrainConfig], bool], Values]] = {
    **{mode.flag: (_answer_of(mode, mode.is_asked), mode.goes_with) for mode in MODES if mode.goes_with},
    "features": (
        lambda config: config.features == "cached",
        {"tune": ("head",), "augmentation": ("none",), "mirror": ("off", "auto"), "shift_pixels": (0, "auto")}
        | dict.fromkeys(("mixup", "cutmix", "color_jitter", "random_erasing"), (0,))
        | {"progressive_size": ("",), "engine": OUR_ENGINE, "loss": OF_CLASSES, "compile": NOT_COMPILED},
    ),
    "solver": (
        lambda config: config.solver == "lbfgs",
        {"loss": ("cross_entropy",), "class_weights": ("none",), "sampling": ("uniform",)}
        # The solver fills the shards that a rank saves; with --replicate-across nodes, the other replicas have none.
        | {"ema": (0,), "lookahead": (0,), "replicate_across": ("none",), **TOGETHER},
    ),
    "compile": (
        lambda config: config.compile == "on",
        {"progressive_size": ("",), "eval_image_size": (0,), "activation_checkpointing": (False,)},  # one input shape
    ),
    "weights": (lambda config: bool(config.weights), {"pretrained": (False,)}),
    # The speed is measured with images.
    "minutes": (lambda config: config.minutes > 0 and config.solver == "steps", {"features": ("computed",)}),
    "audit": (
        lambda config: config.audit > 0,
        {"strategy": ("ddp",), "engine": OUR_ENGINE, "loss": OF_CLASSES}  # ddp: every rank has all weights
        | {"sync_batchnorm": (False,), "features": ("computed",)}
        | {way.flag: (1,) for way in WAYS if not way.engine},
    ),
}


def check_config(config: TrainConfig, label_of: Mapping[str, str]) -> TrainConfig:
    """Check everything that needs neither torch nor the data: types, ranges, names, and contradictions.

    Args:
        config: the configuration.
        label_of: the name of each field in messages: its flag, or its file and key.

    Returns:
        The configuration with its task's defaults; the plug-ins that it names are loaded.

    Raises:
        UserError: for the first value that is wrong.
    """
    config = dataclasses.replace(config, plugin=load_plugins(config.plugin))  # plug-ins may add names checked below
    usual = asked_task(config).usual.items()
    config = dataclasses.replace(config, **{n: value for n, value in usual if getattr(config, n) == FIELDS[n].default})
    for name, field in FIELDS.items():
        if not is_allowed(value := getattr(config, name), field):
            raise wrong_value(label_of[name], value, allowed_values(field), ())
    for mistake in chain(_wrong_words(config, label_of), _contradictions(config, label_of)):
        raise UserError(mistake)
    if config.resume == "never" or (config.resume == "auto" and not run_folder(config).has_checkpoint):
        check_starting_weights(config, label_of)
    return in_chunks(config)


def check_starting_weights(config: TrainConfig, label_of: Mapping[str, str]) -> None:
    """Check that frozen layers start from trained weights, in a run that does not resume from a checkpoint.

    Raises:
        UserError: if frozen layers would keep random weights.
    """
    has_weights = config.weights or config.pretrained or model_spec(config.model_type).always_pretrained
    if read_tune(config.tune)[0] != "full" and not has_weights:
        raise UserError(
            f"{label_of['tune']} {config.tune} would leave the frozen layers with random weights: "
            f"add {label_of['pretrained']}, or {label_of['weights']} FILE."
        )


def _wrong_words(config: TrainConfig, of: Mapping[str, str]) -> Iterator[str]:
    """Yield mistakes in single values, or raise the UserError of a value's parser."""
    check_model_name(config.model_type)
    check_name("loss", config.loss, LOSSES)
    if config.batch_size == "auto" and config.gradient_accumulation_steps > 1:
        yield (
            f"{of['batch_size']} auto also chooses {of['gradient_accumulation_steps']}: leave it out. For more images "
            f"per update, use {of['global_batch']} N."
        )
    if config.strategy in OF_LAUNCHERS:
        yield (
            f"{of['strategy']} {config.strategy} is only for the launchers, which run the planner: use bash "
            f"scripts/launch_distributed.sh {config.model_type} {config.strategy} <num_gpus> {config.batch_size} "
            f"{config.epochs}."
        )
    check_name("strategy", config.strategy, STRATEGIES)
    augmentation_of(config, default="crop_flip")
    find_dataset(config.data)
    if "://" in config.log_dir:
        yield f"{of['log_dir']} is a URL: use a folder, and copy the run afterwards."
    bad_image_share(config.bad_images)
    size_ramp(config.progressive_size)
    if config.order == "shards" and config.sampling == "balanced":
        yield (
            f"{of['sampling']} balanced draws images from the whole data set, but {of['order']} shards reads a few "
            f"shards at a time: use one of them, or {of['class_weights']} balanced."
        )
    if config.workers != "auto" and not re.fullmatch(r"[0-9]{1,3}", config.workers):
        yield f"{of['workers']} {config.workers!r}: expected a whole number from 0 to 999, or auto."
    if config.run_name and not RUN_NAME_PATTERN.fullmatch(config.run_name):
        yield (
            f"{of['run_name']} {config.run_name!r}: use at most 120 letters, digits, '.', '_' and '-', beginning with "
            "a letter or digit."
        )
    for name in config.destinations:
        check_name("logger", name, LOGGERS)
    plan = STRATEGIES[config.strategy]
    if config.offload not in plan.offloadable:
        able = f"{of['strategy']} {config.strategy} supports only {of['offload']} {either(plan.offloadable)}"
        yield f"{of['offload']} {config.offload}: {able}."
    if config.replicate_across == "nodes" and (config.engine not in OUR_ENGINE or plan.zero_stage == 1):
        yield f"{of['replicate_across']} nodes needs --engine torch, and --strategy fsdp_stage2 or fsdp_stage3."
    shards = plan.zero_stage > 1
    check_optimizer(of["optimizer"], config.optimizer, config.strategy, config.engine, shards_parameters=shards)
    yield from _wrong_rules(config, of)
    yield from _wrong_schedule(config, of)


def _restrictions(config: TrainConfig) -> Iterator[tuple[str, Values]]:
    """Yield each setting that restricts others in this run, and the values that these may have, the usual one first."""
    yield from ((name, allowed) for name, (is_chosen, allowed) in GOES_WITH.items() if is_chosen(config))
    yield from ((name, TOGETHER) for name in config.mesh)
    task, *others = (task for task in (kind(config) for kind in TASKS) if task.is_asked())
    pairs: list[tuple[Mode, Mode]] = [(task, other) for other in others[:-1]]  # the last is the usual task
    pairs += [(way, task) for way in ways_of(config, TORCH) if task.needs_images and not way.keeps_images()]
    yield from ((mode.flag, {other.flag: (FIELDS[other.flag].default,)}) for mode, other in pairs)


def _contradictions(config: TrainConfig, of: Mapping[str, str]) -> Iterator[str]:
    """Yield contradictions between settings."""
    for name, allowed in _restrictions(config):
        for other, values in allowed.items():
            if (value := getattr(config, other)) not in values:
                cure = f"leave {of[other]} out" if value is True or values == ("",) else f"use {of[other]} {values[0]}"
                given = of[other] if value is True else f"{of[other]} {shown(value)}"
                yield f"{of[name]} {getattr(config, name)} cannot be combined with {given}: {cure}."
    if config.solver == "lbfgs" and not config.weight_decay:
        yield f"{of['solver']} lbfgs needs a {of['weight_decay']} above 0: without it there may be no minimum."
    for mode in MODES:
        yield from mode(config).mistakes(of)
    if config.learning_rate == "auto" and config.base_batch_size:
        yield f"{of['base_batch_size']}: {of['learning_rate']} auto searches at this batch size: use auto alone."
    if config.mixup_off_epochs > config.epochs:
        yield f"{of['mixup_off_epochs']} {config.mixup_off_epochs}: the run has only {plural(config.epochs, 'epoch')}."


def _rules_of(config: TrainConfig) -> Iterator[tuple[str, str, str]]:
    """Yield, for each update rule of a run, the setting that selects it, its name, and its options as text."""
    yield "optimizer", config.optimizer, config.optimizer_options
    if config.optimizer in MATRIX_RULES:
        yield "fallback_optimizer", *read_fallback(config.fallback_optimizer)[::2]


def _wrong_rules(config: TrainConfig, of: Mapping[str, str]) -> Iterator[str]:
    """Yield mistakes in the settings of the update rules."""
    read_fallback(config.fallback_optimizer)  # checked even if it is not used
    options = read_options(of["optimizer_options"], config.optimizer_options)
    if config.optimizer in MATRIX_RULES and options.get("momentum", config.momentum) == 0:
        yield f"{of['optimizer']} {config.optimizer} needs a momentum above 0, such as {config.optimizer}:0.95."
    for name, rule, _ in _rules_of(config):
        if rule in SHIFTED_RATE and head_epochs_of(config):
            yield (
                f"{of[name]} {rule} changes weights even at a learning rate of 0, and the backbone has that rate "
                f"in the head's epochs: use {of['head_epochs']} 0, or another rule such as adamw."
            )


def _wrong_schedule(config: TrainConfig, of: Mapping[str, str]) -> Iterator[str]:
    """Yield mistakes in the schedule."""
    schedule_fields(config, 1)
    decay, schedule = given_decay(config.schedule), f"{of['schedule']} {config.schedule}"
    last = round(decay + config.cooldown_epochs, 6)
    if decay and last % 1:
        start = f"{math.ceil(last) - config.cooldown_epochs:.9g}"
        yield f"{schedule}: the decay of wsd must begin with a new epoch: use wsd:{start}."
    used = 0.0  # epochs of the run
    for name in ("warmup_epochs", "cooldown_epochs", "schedule"):
        epochs = decay if name == "schedule" else getattr(config, name)
        before = " is too long together with the schedule's other phases" if used else ""
        used += 0.0 if epochs == "auto" else epochs
        if epochs and round(used, 5) > config.epochs:
            yield f"{of[name]} {getattr(config, name)}{before}: the run has only {plural(config.epochs, 'epoch')}."


def _mixes(config: TrainConfig) -> bool:
    """Return whether the images of a micro-batch are mixed with each other."""
    return config.batch_size != 1 and bool(config.mixup or config.cutmix)


def _shifts(config: TrainConfig) -> bool:
    policy = config.augmentation
    return config.shift_pixels != 0 if policy == "auto" else augmentation_of(config, policy).shift


def _has_momentum(config: TrainConfig) -> bool:
    from timm.optim import get_optimizer_info

    rules = [(get_optimizer_info(rule), options) for _, rule, options in _rules_of(config)]
    return any(rule.has_momentum and "momentum" not in read_options("", options) for rule, options in rules)


# For each flag: the condition under which it has an effect.
USED: dict[str, Callable[[TrainConfig], bool]] = {
    "val_fraction": lambda config: not config.folds,
    "eval_crop": lambda config: config.fit in ("auto", "crop"),
    "momentum": _has_momentum,
    # The other schedules decay to a final rate.
    **dict.fromkeys(
        ("final_learning_rate_scale", "cooldown_epochs"),
        lambda config: config.schedule.partition(":")[0] not in ("step", "constant"),
    ),
    "fallback_optimizer": lambda config: config.optimizer in MATRIX_RULES,
    **dict.fromkeys(("head_epochs", "backbone_learning_rate_scale"), has_slow_backbone),
    **dict.fromkeys(("mixup", "cutmix", "mixup_probability", "mixup_off_epochs"), _mixes),
    "mixup_switch_probability": lambda config: _mixes(config) and bool(config.mixup and config.cutmix),
    "shift_padding": _shifts,
    **{name: _answer_of(mode, mode.uses_own) for mode in MODES for name in mode.own},
    **dict.fromkeys(("epochs", "learning_rate", "optimizer", "schedule"), lambda config: config.solver == "steps"),
}


def needing_torch(config: TrainConfig) -> str:
    """Return the first setting, with its value, that only PyTorch's engine supports, or '' if there is none."""
    needing = (name for name, allowed in _restrictions(config) if TORCH in allowed.get("engine", ()))
    return next((f"{FLAG_OF[name]} {getattr(config, name)}" for name in needing), "")


def note_unused_flags(config: TrainConfig) -> list[str]:
    """Return a note for the log that names the flags that have no effect in this run."""
    given = [name for name, field in FIELDS.items() if getattr(config, name) != field.default]
    unused = [FLAG_OF[name] for name in given if name in USED and not USED[name](config)]
    return [f"without effect in this run: {', '.join(unused)}"] if unused else []
