"""The check of a configuration: types, ranges, names, and values that exclude each other."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from models import check_model_name, model_spec
from training.base.errors import UserError, shown, unknown_name
from training.config import FIELDS, TrainConfig
from training.config.global_batch import in_chunks
from training.config.values import allowed_values, is_allowed
from training.data import bad_image_share, find_dataset
from training.data.augmentations import augmentation_of
from training.data.image_sizes import size_ramp
from training.data.settings import MULTILABEL
from training.engines.strategies import STRATEGIES, check_micro_batches
from training.observe.new_run import run_folder
from training.observe.settings import TRACKERS
from training.recipe import read_distill, read_tune
from training.recipe.class_weights import given_weights
from training.recipe.rules import ELEMENT_WISE, MATRIX_RULES, SHIFTED_RATE, SQUARED_DECAY, check_optimizer, read_options
from training.recipe.schedule import SCHEDULES, head_epochs_of, schedule_names

DECAY_WITHIN_RUN = {"wsd": ["decay_epochs"]}  # schedules whose decay must leave room in the run
MILESTONES_PATTERN = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?(,[0-9]{1,6}(\.[0-9]{1,6})?)*")
# The values that settings may have with a loss that compares images, the usual one first.
OF_CLASSIFIERS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("mixup", "cutmix"), (0,)),
    "distill": ("",),
    "class_weights": ("none",),
    "engine": ("torch", "auto", "native"),
    "compile": ("off", "auto"),
}
# The same with several labels.
OF_MULTILABEL: dict[str, tuple[object, ...]] = {
    "loss": ("bce",),
    "bce_target_threshold": (0,),
    "class_weights": ("none",),
    "sampling": ("uniform",),
    "distill": ("",),
    "features": ("computed",),
    "best_by": ("map", "macro_f1", "auroc", "loss"),
}
# The same with islands, which each have an engine, an optimizer and statistics of their own.
OF_ISLANDS: dict[str, tuple[object, ...]] = {
    "strategy": ("ddp",),
    "engine": ("torch", "auto", "native"),
    "precision": ("fp32", "auto", "bf16"),  # fp16 has a loss scale, which would be another on each
    "loss": ("cross_entropy", "bce"),
    "sync_batchnorm": (False,),
    **dict.fromkeys(("ema", "lookahead"), (0,)),  # the outer weights are such an average
}
# The values that settings may have if several ranks compute every layer, the usual one first.
OF_TENSOR_PARALLEL: dict[str, tuple[object, ...]] = {
    "engine": ("torch", "auto", "native"),
    "compile": ("off", "auto"),
    "offload": ("none",),
    "tune": ("full",),
    "replicate_across": ("none",),
    "local_steps": (1,),
    "optimizer": ELEMENT_WISE,
}
# The same with a model that is cut into stages.
OF_PIPELINES: dict[str, tuple[object, ...]] = {
    "strategy": ("ddp",),
    "engine": ("torch", "auto", "native"),
    "loss": ("cross_entropy", "bce"),
    "compile": ("off", "auto"),
    "distill": ("",),
    "sync_batchnorm": (False,),
    "local_steps": (1,),
}
# The same if ranks check each other's gradients.
OF_AUDITS: dict[str, tuple[object, ...]] = {
    "strategy": ("ddp",),  # every rank has all weights
    "engine": ("torch", "auto", "native"),
    "loss": ("cross_entropy", "bce"),
    "sync_batchnorm": (False,),
    "features": ("computed",),
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "local_steps"), (1,)),
}
# The same if the head reads what was computed of each image once.
OF_CACHED_FEATURES: dict[str, tuple[object, ...]] = {
    "tune": ("head",),
    "augmentation": ("none",),
    "mirror": ("off", "auto"),
    "shift_pixels": (0, "auto"),
    **dict.fromkeys(("color_jitter", "random_erasing", "mixup", "cutmix"), (0,)),
    **dict.fromkeys(("progressive_size", "distill"), ("",)),
    "engine": ("torch", "auto", "native"),
    "loss": ("cross_entropy", "bce"),
    "compile": ("off", "auto"),
    "pipeline_parallel": (1,),
}
# The same if the head is solved for, in place of being trained by steps.
OF_SOLVED_HEADS: dict[str, tuple[object, ...]] = {
    "features": ("cached",),
    "loss": ("cross_entropy",),
    "class_weights": ("none",),
    "sampling": ("uniform",),
    **dict.fromkeys(("ema", "lookahead"), (0,)),
    "local_steps": (1,),
    "replicate_across": ("none",),  # whose other replicas have no parts to fill
}
OF_LAUNCHERS = ("auto",)  # strategies that a launcher replaces by another
DESTINATIONS = ("tensorboard", *TRACKERS)
RUN_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def check_config(config: TrainConfig, label_of: Mapping[str, str]) -> TrainConfig:
    """Check what needs neither torch nor the data: types, ranges, names, and values that exclude each other.

    Args:
        config: the configuration.
        label_of: the name of each field in a message: its flag, or file and key.

    Returns:
        The configuration, with the chunks of a gradient cache as its micro-batches.

    Raises:
        UserError: for the first value that is wrong.
    """
    if config.task == MULTILABEL:  # what one label has by default, and several do not
        chosen = {"loss": "bce", "best_by": "map"}
        usual = {name: value for name, value in chosen.items() if getattr(config, name) == FIELDS[name].default}
        config = dataclasses.replace(config, **usual)  # type: ignore[arg-type]  # two of their values
    for name, field in FIELDS.items():
        value = getattr(config, name)
        if not is_allowed(value, field):
            raise UserError(f"{label_of[name]} {shown(value)}: expected {allowed_values(field)}.")
    check_model_name(config.model_type)
    if config.batch_size == "auto" and config.gradient_accumulation_steps > 1:
        raise UserError(
            f"{label_of['batch_size']} auto finds {label_of['gradient_accumulation_steps']}: leave that out, and give "
            f"{label_of['global_batch']} N for more images per update."
        )
    if config.strategy in OF_LAUNCHERS:
        raise UserError(
            f"{label_of['strategy']} {config.strategy} is for the launchers, which ask scripts/plan.py: type bash "
            f"scripts/launch_distributed.sh {config.model_type} {config.strategy} <num_gpus> {config.batch_size} "
            f"{config.epochs}."
        )
    if config.strategy not in STRATEGIES:
        raise unknown_name("strategy", config.strategy, STRATEGIES)
    augmentation_of(config, default="crop_flip")
    find_dataset(config.data)
    if "://" in config.log_dir:
        raise UserError(f"{label_of['log_dir']} is a URL: give a folder, and copy the run afterwards.")
    bad_image_share(config.bad_images)
    given_weights(config.class_weights)
    size_ramp(config.progressive_size)
    if config.compile == "on" and (config.progressive_size or config.eval_image_size):
        raise UserError(
            f"{label_of['compile']} on: images of several sizes are not compiled, leave out "
            f"{label_of['progressive_size']} and {label_of['eval_image_size']}."
        )
    if config.compile == "on" and config.activation_checkpointing:
        raise UserError(
            f"{label_of['compile']} on and {label_of['activation_checkpointing']} exclude each other: give one."
        )
    if config.class_weights != "none" and config.sampling == "balanced":
        raise UserError(
            f"{label_of['class_weights']} and {label_of['sampling']} balanced both make up for rare classes: "
            "give one of them."
        )
    if config.order == "shards" and config.sampling == "balanced":
        raise UserError(
            f"{label_of['sampling']} balanced takes its images from everywhere, {label_of['order']} shards from a few "
            f"shards at a time: give one of them, or {label_of['class_weights']} balanced."
        )
    if config.bce_target_threshold and config.loss != "bce":
        raise UserError(f"{label_of['bce_target_threshold']} is of {label_of['loss']} bce only: give both, or none.")
    if config.workers != "auto" and not re.fullmatch(r"[0-9]{1,3}", config.workers):
        raise UserError(f"{label_of['workers']} {config.workers!r}: expected a whole number from 0 to 999, or auto.")
    if config.run_name and not RUN_NAME_PATTERN.fullmatch(config.run_name):
        raise UserError(
            f"{label_of['run_name']} {config.run_name!r}: use letters, digits, '.', '_' and '-', at most 120, "
            "beginning with a letter or digit."
        )
    for name in config.destinations:
        if name not in DESTINATIONS:
            raise unknown_name("logger", name, DESTINATIONS)
    offloadable = STRATEGIES[config.strategy].offloadable
    if config.offload not in offloadable:
        raise UserError(
            f"{label_of['offload']} {config.offload}: strategy {config.strategy} allows {', '.join(offloadable)}."
        )
    is_whole = STRATEGIES[config.strategy].zero_stage == 1
    if config.replicate_across == "nodes" and (config.engine == "deepspeed" or is_whole):
        raise UserError(
            f"{label_of['replicate_across']} nodes: --engine torch does it, at fsdp_stage2 and fsdp_stage3."
        )
    check_optimizer(
        label_of["optimizer"], config.optimizer, config.strategy, config.engine, shards_parameters=not is_whole
    )
    _check_rules(config, label_of)
    _check_schedule(config, label_of)
    _check_contrast(config, label_of)
    if config.distill:
        read_distill(config.distill)
    if bool(config.distill) != bool(config.teacher):
        raise UserError(f"{label_of['distill']} learns from {label_of['teacher']}: give both, or none.")
    if config.features == "cached":
        _check_values(config, label_of, f"{label_of['features']} cached", OF_CACHED_FEATURES)
    if config.solver == "lbfgs":
        _check_values(config, label_of, f"{label_of['solver']} lbfgs", OF_SOLVED_HEADS)
        if not config.weight_decay:
            raise UserError(
                f"{label_of['solver']} lbfgs needs a {label_of['weight_decay']} above 0: else may be no minimum."
            )
    if config.task == MULTILABEL:
        _check_values(config, label_of, f"{label_of['task']} {MULTILABEL}", OF_MULTILABEL)
        if model_spec(config.model_type).takes_members:
            raise UserError(
                f"{label_of['task']} {MULTILABEL}: the members of an ensemble choose one class: give another."
            )
    if config.has_islands:
        _check_values(config, label_of, f"{label_of['local_steps']} {config.local_steps}", OF_ISLANDS)
    if config.tensor_parallel > 1:
        setting = f"{label_of['tensor_parallel']} {config.tensor_parallel}"
        _check_values(config, label_of, setting, OF_TENSOR_PARALLEL)
    if config.audit:
        _check_values(config, label_of, f"{label_of['audit']} {config.audit}", OF_AUDITS)
    if config.pipeline_parallel > 1:
        _check_pipeline(config, label_of)
    if config.learning_rate == "auto" and config.base_batch_size:
        raise UserError(
            f"{label_of['base_batch_size']}: leave it out, {label_of['learning_rate']} auto tries those of this batch."
        )
    if config.raw_accuracy and not config.ema:
        raise UserError(f"{label_of['raw_accuracy']} compares with {label_of['ema']}: give both, or none.")
    if config.mixup_off_epochs > config.epochs:
        raise UserError(
            f"{label_of['mixup_off_epochs']} {config.mixup_off_epochs}: the run has {config.epochs} epochs only."
        )
    if config.whitened_stem and (
        config.weights or config.pretrained or model_spec(config.model_type).always_pretrained
    ):
        raise UserError(f"{label_of['whitened_stem']} would replace weights that are loaded: leave it out.")
    if config.weights and config.pretrained:
        raise UserError(f"{label_of['weights']} and {label_of['pretrained']} exclude each other: give one of them.")
    if read_tune(config.tune)[0] != "full" and (
        config.resume == "never" or (config.resume == "auto" and not run_folder(config).has_checkpoint)
    ):
        check_starting_weights(config, label_of)
    return in_chunks(config)


def check_starting_weights(config: TrainConfig, label_of: Mapping[str, str]) -> None:
    """Check that what is not trained comes from somewhere, for a run that does not go on from a checkpoint.

    Raises:
        UserError: if it would keep random weights.
    """
    has_weights = config.weights or config.pretrained or model_spec(config.model_type).always_pretrained
    if read_tune(config.tune)[0] != "full" and not has_weights:
        raise UserError(
            f"{label_of['tune']} {config.tune}: what is not trained would keep random weights: "
            f"add {label_of['pretrained']}, or {label_of['weights']} FILE."
        )


def _check_rules(config: TrainConfig, label_of: Mapping[str, str]) -> None:
    """Check values that the update rules do not go with; raise UserError."""
    if config.fallback_optimizer not in ELEMENT_WISE:
        raise unknown_name("fallback optimizer", config.fallback_optimizer, ELEMENT_WISE)
    options = {
        name: read_options(label_of[name], getattr(config, name)) for name in ("optimizer_options", "fallback_options")
    }
    if config.optimizer in MATRIX_RULES and options["optimizer_options"].get("momentum", config.momentum) == 0:
        raise UserError(
            f"{label_of['optimizer']} {config.optimizer} needs a {label_of['momentum']} above 0, such as 0.95."
        )
    for name in ("optimizer", "fallback_optimizer") if config.optimizer in MATRIX_RULES else ("optimizer",):
        rule = getattr(config, name)
        if rule in SQUARED_DECAY and config.base_batch_size:
            raise UserError(
                f"{label_of[name]} {rule} and {label_of['base_batch_size']} exclude each other: its decay refers to "
                "--learning-rate itself."
            )
        if rule in SHIFTED_RATE and head_epochs_of(config):
            raise UserError(
                f"{label_of[name]} {rule} moves weights at a learning rate of 0, which the backbone has in the epochs "
                f"of the head: give {label_of['head_epochs']} 0, or another rule such as adamw."
            )


def _check_contrast(config: TrainConfig, label_of: Mapping[str, str]) -> None:
    """Check what a loss that compares images does not go with; raise UserError."""
    cache, loss = (f"{label_of[name]} {getattr(config, name)}" for name in ("gradient_cache", "loss"))
    if config.gradient_cache and not config.is_contrastive:
        raise UserError(
            f"{cache}: with {loss} each image has a loss of its own, and {label_of['gradient_accumulation_steps']} N "
            "gives the same gradient in the same memory: use that."
        )
    if not config.is_contrastive:
        return
    if config.gradient_cache and config.batch_size == "auto":
        raise UserError(f"{cache} is what goes through the network at a time: give {label_of['batch_size']} a number.")
    if config.learning_rate == "auto":
        raise UserError(
            f"{loss} does not go with {label_of['learning_rate']} auto, which knows other losses: give one."
        )
    _check_values(config, label_of, loss, OF_CLASSIFIERS)
    if model_spec(config.model_type).takes_members:
        raise UserError(f"{loss}: the members of an ensemble have no features in common: train each by itself.")


def _check_values(
    config: TrainConfig, label_of: Mapping[str, str], setting: str, allowed_values_of: Mapping[str, tuple[object, ...]]
) -> None:
    """Raise UserError for the first value that does not go with a setting, given in words."""
    for name, allowed in allowed_values_of.items():
        value = getattr(config, name)
        if value not in allowed:
            cure = (
                f"leave {label_of[name]} out"
                if value is True or allowed == ("",)
                else f"give {label_of[name]} {allowed[0]}"
            )
            raise UserError(f"{setting} does not go with {label_of[name]} {shown(value)}: {cure}.")


def _check_pipeline(config: TrainConfig, label_of: Mapping[str, str]) -> None:
    """Check what a model in stages does not go with; raise UserError."""
    flag = f"{label_of['pipeline_parallel']} {config.pipeline_parallel}"
    # The loss of an ensemble's members is computed where their images are.
    taught = {} if config.has_stages else {"distill": (config.distill,)}
    _check_values(config, label_of, flag, OF_PIPELINES | taught)
    for name in ("batch_size", "learning_rate"):
        if getattr(config, name) == "auto":
            raise UserError(f"{flag} does not go with {label_of[name]} auto: give {label_of[name]} a number.")
    if not config.has_stages:
        members = config.ensemble_members.count(",") + 1
        if members < config.pipeline_parallel:
            raise UserError(
                f"{flag}: an ensemble of {members} members fills {members} ranks: give "
                f"{label_of['pipeline_parallel']} {members} or less, or more {label_of['ensemble_members']}."
            )
    elif not config.global_batch:
        steps = config.gradient_accumulation_steps
        check_micro_batches(config.pipeline_schedule, config.pipeline_parallel, steps)


def _check_schedule(config: TrainConfig, label_of: Mapping[str, str]) -> None:
    """Check what belongs to the schedule; raise UserError."""
    decays: dict[str, None] = {}  # values that must leave room in the run
    fallback = config.fallback_schedule or config.schedule
    for kind, name in (("schedule", config.schedule), ("fallback schedule", fallback)):
        if name not in SCHEDULES:
            raise unknown_name(kind, name, SCHEDULES)
    for name in schedule_names(config):
        decays |= dict.fromkeys(DECAY_WITHIN_RUN.get(name, ()))
    if decays and config.decay_epochs != "auto":
        last = round(config.decay_epochs + config.cooldown_epochs, 6)
        if last % 1:
            raise UserError(
                f"{label_of['decay_epochs']} {config.decay_epochs}: the decay of wsd begins with an epoch, give "
                f"{math.ceil(last) - config.cooldown_epochs:.9g}."
            )
    used = 0.0  # epochs of the run
    for name in ("warmup_epochs", "cooldown_epochs", *decays):
        used += 0.0 if getattr(config, name) == "auto" else getattr(config, name)
        if used > config.epochs:
            before = "" if used == getattr(config, name) else " with the epochs before it"
            raise UserError(
                f"{label_of[name]} {getattr(config, name)}{before}: the run has {config.epochs} epochs only."
            )
    if config.milestones and not MILESTONES_PATTERN.fullmatch(config.milestones):
        raise UserError(f"{label_of['milestones']} {shown(config.milestones)}: expected epochs such as 30,60,80.")
