"""The configuration of a run: one frozen dataclass that declares the command line, `--help` and the YAML file.

This module imports neither torch nor deepspeed, so that `--help` and a launcher's check of the arguments cost a
fraction of a second.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from models import LARGEST_IMAGE_SIZE, MODELS, MOST_MEMBERS, check_model_name, model_spec
from training.data import BAD_IMAGES_USAGE, DATASETS, DECODERS, bad_image_share
from training.data.augmentations import AUGMENTATION_NAMES, CROP_RATIO, CROP_SCALE, RANDAUGMENT, augmentation_of
from training.data.image_sizes import USAGE as SIZE_USAGE
from training.data.image_sizes import size_ramp
from training.errors import UserError, shown, unknown_name
from training.parallel.strategies import STRATEGIES
from training.recipe import TUNE_USAGE, read_tune
from training.recipe.class_weights import USAGE as CLASS_WEIGHTS_USAGE
from training.recipe.class_weights import given_weights
from training.recipe.rules import (
    ALLOWED,
    ELEMENT_WISE,
    MATRIX_RULES,
    OPTION_READERS,
    SQUARED_DECAY,
    check_optimizer,
    read_options,
)
from training.recipe.schedule import SCHEDULES

REPO_ROOT = Path(__file__).resolve().parents[1]
PRESETS = tuple(sorted(path.stem for path in (REPO_ROOT / "presets").glob("*.yaml")))
LARGEST_BATCH = 65_536  # images of one forward pass
# The words that YAML 1.1 reads as booleans.
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
DECAY_WITHIN_RUN = {"wsd": ["decay_epochs"]}  # schedules whose decay must leave room in the run
MILESTONES_PATTERN = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?(,[0-9]{1,6}(\.[0-9]{1,6})?)*")
RUN_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def option(
    default: Any, help: str, *, low: float | None = None, high: float | None = 10**9, above: float | None = None
) -> Any:
    """Declare a field with its help text and its range.

    Args:
        default: the value if neither file nor command line gives one.
        help: one sentence with the unit.
        low: smallest allowed value, itself included.
        high: largest allowed value, itself included.
        above: lower bound, itself excluded.
    """
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high, "above": above})


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All settings of a run. Field `batch_size` is the flag `--batch-size`, and so on."""

    preset: str = option("", f"Start from these values, which files and flags override: {', '.join(PRESETS)}.")

    # What is trained, and how it is sharded.
    model_type: str = option("mobilenet", f"Model: one of {', '.join(MODELS)}, or timm:<name> for any timm model.")
    strategy: str = option("ddp", f"How training state is sharded: {', '.join(STRATEGIES)}.")
    epochs: int = option(30, "Passes over the training data.", low=1, high=100_000)
    batch_size: int = option(16, "Images per GPU (or CPU rank) and micro-step.", low=1, high=LARGEST_BATCH)
    gradient_accumulation_steps: int = option(
        1, "Micro-steps per optimizer step; BatchNorm still sees single micro-batches.", low=1, high=4096
    )
    learning_rate: float = option(1e-3, "Peak learning rate, before scaling by --base-batch-size.", above=0, high=100)

    # Model.
    pretrained: bool = option(False, "Start from the model's published weights (needs a network or a warm cache).")
    weights: str = option("", "Start from this local file: safetensors, or a pickle of plain tensors.")
    tune: str = option(
        "full",
        f"What is trained of a model with trained weights: {TUNE_USAGE} (the last N layers; adapters of rank R). "
        "The head always is; all else keeps its weights.",
    )
    ensemble_members: str = option(
        "mobilenet,efficientnet,vgg", f"Members of --model-type ensemble, comma-separated; at most {MOST_MEMBERS}."
    )
    head_epochs: int = option(
        2, "mobilenet_finetuned: epochs in which only the new head learns, before all layers do.", low=0, high=100_000
    )
    backbone_learning_rate_scale: float = option(
        0.1, "mobilenet_finetuned: learning rate of the backbone as a share of the head's.", above=0, high=1
    )
    stem: Literal["auto", "keep"] = option(
        "auto", "First layer's stride; auto: 1 instead of 2 for images below 64 pixels; keep: the network's own."
    )
    whitened_stem: bool = option(
        False, "The first convolution whitens patches of the training images, and is not trained."
    )
    drop_path: float = option(
        0.0,
        "Probability that the last residual block of a timm model is skipped for an image; less before.",
        low=0,
        high=0.99,
    )
    activation_checkpointing: bool = option(False, "Recompute activations in backward: less memory, more time.")
    sync_batchnorm: bool = option(False, "BatchNorm statistics over all ranks' samples instead of each rank's own.")

    # Optimizer and schedule.
    optimizer: str = option(
        "adamw",
        "Update rule, by timm's name; sgd has Nesterov momentum. Under every strategy: "
        f"{', '.join([*ELEMENT_WISE, 'lamb'])}. Under ddp alone: {', '.join(ALLOWED[len(ELEMENT_WISE) + 1 :])}.",
    )
    fallback_optimizer: str = option(
        "adamw", f"{', '.join(MATRIX_RULES)}: rule of the head, and of all that is no matrix and no convolution."
    )
    fallback_learning_rate_scale: float = option(
        1.0, "Learning rate of --fallback-optimizer, as a share of --learning-rate.", above=0, high=1000
    )
    optimizer_options: str = option(
        "", f"More of the rule, such as betas=0.9/0.95,eps=1e-6: {', '.join(sorted(OPTION_READERS))}."
    )
    fallback_options: str = option("", "The same of --fallback-optimizer, such as momentum=0.85.")
    weight_decay: float = option(0.05, "Decay of weights (decoupled in adamw); see --no-weight-decay.", low=0, high=10)
    no_weight_decay: Literal["vectors", "model"] = option(
        "vectors", "What has no weight decay: vectors (biases, norms); model: also what a timm model names."
    )
    layer_decay: float = option(
        1.0, "Learning rate of a layer as a share of that of the next one, towards the head.", above=0, high=1
    )
    momentum: float = option(0.9, "Momentum of rules that have one, such as sgd.", low=0, high=0.9999)
    gradient_clipping: float = option(1.0, "Largest global gradient norm (L2); 0 switches clipping off.", low=0)
    loss: Literal["cross_entropy", "bce"] = option(
        "cross_entropy", "Training loss; bce: binary cross-entropy of each class, averaged over the classes."
    )
    label_smoothing: float = option(0.1, "Share of each target spread over all classes.", low=0, high=0.99)
    bce_target_threshold: float = option(
        0.0, "--loss bce: smoothed and mixed targets above this are 1, the others 0; 0: as they are.", low=0, high=0.99
    )
    class_weights: str = option("none", f"Weight of each class in the training loss: {CLASS_WEIGHTS_USAGE}.")
    ema: float = option(
        0.0,
        "Evaluate and export an exponential moving average of the weights that keeps this share of itself in each step "
        "(less in the first ones); 0: the weights themselves.",
        low=0,
        high=0.999999,
    )
    lookahead: int = option(
        0, "Steps between two pulls of the weights halfway back to slow ones (timm's default is 6); 0: none.", low=0
    )
    warmup_epochs: float | Literal["auto"] = option(
        "auto",
        "Epochs of linear warm-up from 0 to the peak learning rate; auto: 1, but at most a tenth of the run.",
        low=0,
    )
    schedule: str = option(
        "cosine",
        f"How the learning rate falls after the warm-up: {', '.join(SCHEDULES)}; wsd: warm-up, stable, decay; "
        "sweep: it rises, for scripts/find_learning_rate.py.",
    )
    final_learning_rate_scale: float = option(
        0.01, "Learning rate at the end of the schedule, as a share of the peak; not of step.", low=0, high=1
    )
    decay_epochs: float | Literal["auto"] = option(
        "auto",
        "step: epochs between two decays; wsd: epochs of the decay, whole ones. auto: a third, or a fifth, of the run.",
        low=0.1,
    )
    decay_rate: float = option(0.1, "step: factor on the learning rate at each decay.", above=0, high=1)
    milestones: str = option("", "step: epochs at which the rate decays, such as 30,60,80; default: --decay-epochs.")
    decay_power: float = option(1.0, "polynomial: exponent; 1 is linear.", above=0, high=100)
    decay_shape: Literal["sqrt", "linear", "cosine"] = option(
        "sqrt", "wsd: how the rate falls with the share p of the decay; sqrt: as 1 - sqrt(p)."
    )
    cooldown_epochs: float = option(0.0, "Last epochs of the run, at the final learning rate.", low=0)
    base_batch_size: int = option(
        0, "Scale --learning-rate by global batch / this (linear scaling rule); 0 leaves it alone.", low=0
    )
    early_stopping_patience: int = option(
        0, "Epochs without a better validation top-1 before stopping; 0: never.", low=0
    )
    seed: int = option(0, "Seed of weights, sample order, augmentation and dropout.", low=0, high=2**31 - 1)

    # Precision and memory.
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option(
        "auto", "Arithmetic; auto: bf16 on GPUs that have it, fp16 on older GPUs, fp32 on CPU."
    )
    offload: Literal["none", "optimizer", "all"] = option(
        "none", "Keep optimizer state (stages 2, 3) or parameters too (all: stage 3) in CPU memory; about 30 % slower."
    )
    engine: Literal["auto", "deepspeed", "native", "torch"] = option(
        "auto", "What shards the training state; auto: native on CPU ranks for models that fit, else deepspeed."
    )
    replicate_across: Literal["none", "nodes"] = option(
        "none", "nodes: shard inside each machine and replicate over machines (stages 2, 3; --engine torch)."
    )
    compile: Literal["auto", "on", "off"] = option(
        "auto",
        "Run the model through torch.compile (a minute or two at the first start); auto: in long runs of models that "
        "were measured to be faster.",
    )
    threads_per_rank: int = option(
        0,
        "CPU threads of each rank; 0: as the checkpoint, else cores / ranks. Another number changes the last bits.",
        low=0,
        high=1024,
    )
    deepspeed_config: str = option("", "Use this DeepSpeed JSON in place of the strategy's own.")

    # Data.
    data: str = option(
        "digits",
        f"Data set: {', '.join(entry.usage for entry in DATASETS.values())} (classes, or train/ and val/).",
    )
    data_root: str = option("~/.cache/zerovision", "Folder that torchvision data sets are read from and downloaded to.")
    download: bool = option(False, "Allow torchvision data sets to be downloaded.")
    val_fraction: float = option(
        0.2, "Share of a folder without train/ and val/ held out for validation.", above=0, high=0.9
    )
    image_size: int = option(
        0, "Side of the square images, in pixels; 0: the data set's own.", low=0, high=LARGEST_IMAGE_SIZE
    )
    eval_image_size: int = option(
        0, "Side of the validation images, at least --image-size; 0: --image-size.", low=0, high=LARGEST_IMAGE_SIZE
    )
    progressive_size: str = option(
        "",
        f"{SIZE_USAGE}: training images of LOW pixels up to epoch FIRST (from 0) that grow to --image-size until LAST.",
    )
    augmentation: str = option("auto", f"Training augmentation: {', '.join(AUGMENTATION_NAMES)}.")
    randaugment: str = option(
        RANDAUGMENT, "timm's string for --augmentation randaugment: m magnitude, n operations, mstd, inc1, ..."
    )
    crop_scale: str = option(CROP_SCALE, "Smallest and largest share of the image's area that a crop takes.")
    crop_ratio: str = option(CROP_RATIO, "Smallest and largest width of a crop, as a multiple of its height.")
    mirror: Literal["auto", "off", "random", "alternate"] = option(
        "auto", "Left to right: half of the time, or every other epoch (alternate); auto: the augmentation's own."
    )
    shift_pixels: int | Literal["auto"] = option(
        "auto", "Farthest shift; 0: none; auto: the augmentation's own.", low=0, high=LARGEST_IMAGE_SIZE
    )
    shift_padding: Literal["zeros", "reflect"] = option("zeros", "What comes in at the edge of a shifted image.")
    color_jitter: float = option(
        0.0, "Most by which brightness, contrast and saturation change, as a share; 0: none.", low=0, high=1
    )
    random_erasing: float = option(0.0, "Probability that a rectangle of an image is erased.", low=0, high=1)
    random_erasing_mode: Literal["pixel", "rand", "const"] = option(
        "pixel", "What fills it: noise, one random colour, or the mean colour."
    )
    mixup: float = option(
        0.0, "Mixup's alpha: images and targets of a micro-batch are blended; 0: none.", low=0, high=100
    )
    cutmix: float = option(0.0, "Cutmix's alpha: images get a rectangle of another one; 0: none.", low=0, high=100)
    mixup_probability: float = option(1.0, "Probability that a micro-batch is mixed.", low=0, high=1)
    mixup_switch_probability: float = option(
        0.5, "Probability of cutmix instead of mixup, if both are on.", low=0, high=1
    )
    mixup_off_epochs: int = option(0, "Last epochs without mixup and cutmix.", low=0, high=100_000)
    sampling: Literal["uniform", "balanced"] = option(
        "uniform",
        "What an epoch consists of; uniform: each sample once; balanced: as many samples, equally many of each class.",
    )
    repeated_augmentation: int = option(
        1,
        "Differently augmented copies of each sample of an epoch, next to each other; its length stays.",
        low=1,
        high=64,
    )
    decode: Literal["cpu", "exact", "gpu"] = option(
        "cpu", f"How image files are decoded: {'; '.join(f'{name}: {text}' for name, text in DECODERS.items())}."
    )
    cache: Literal["auto", "ram", "disk", "off"] = option(
        "auto",
        "Keep the shrunk images of files: in memory, on disk under --data-root; auto: where they fit, if it pays.",
    )
    cache_gb: float = option(
        0.0, "Most gigabytes of all caches together; 0: a quarter of the memory, or 50 on disk.", low=0, high=10**6
    )
    workers: str = option("auto", "Loader processes per rank: a whole number, or auto.")
    bad_images: str = option(
        "error", f"What to do with unreadable images: {BAD_IMAGES_USAGE}; skip allows 0.1 %, skip:0.05 allows 5 %."
    )

    # Output.
    run_name: str = option("", "Name of the run's folders; default: date, model, strategy.")
    log_dir: str = option("", "Folder of all logs; default: logs/ beside scripts/.")
    log_every_steps: int = option(10, "Optimizer steps between two log points.", low=1)
    progress: Literal["auto", "bar", "lines", "off"] = option(
        "auto", "Console progress; auto: a bar on a terminal; off: only start, result and problems."
    )
    tensorboard: bool = option(True, "Write TensorBoard event files.")
    report: bool = option(True, "Write report.html, the whole run on one page, into the run's folder when it ends.")
    profile: int = option(
        0,
        "Steps of rank 0's first epoch that torch.profiler traces into the run's folder; 0: none.",
        low=0,
        high=10_000,
    )

    # Checkpoints, resume, and what ends a run.
    resume: str = option(
        "never", "never, auto (newest good checkpoint of --run-name, if any), must, or a checkpoint folder."
    )
    save_every_steps: int = option(0, "Optimizer steps between checkpoints within an epoch; 0: none by steps.", low=0)
    save_every_minutes: float = option(5.0, "Minutes between checkpoints within an epoch; 0: none by time.", low=0)
    keep_last: int = option(2, "Newest checkpoints to keep, beside the best epoch's.", low=1, high=100_000)
    max_bad_steps: int = option(10, "Skipped steps in a row (gradient not finite) that end the run; 0: never.", low=0)
    hang_timeout: float = option(
        300.0,
        "Seconds without a finished step after which a rank counts as hung (first step and saves: 5 times).",
        above=0,
        high=10**6,
    )
    deterministic: bool = option(False, "Use PyTorch's deterministic algorithms, so that a GPU run can be repeated.")


# What a resumed run may change; everything else is part of the recipe and must match the checkpoint. Accumulation
# follows from the global batch, the data set is identified by its fingerprint, the starting weights no longer matter.
CHANGEABLE_ON_RESUME = frozenset(
    {
        *("strategy", "precision", "offload", "engine", "replicate_across", "compile", "threads_per_rank"),
        "deepspeed_config",
        *("activation_checkpointing", "deterministic"),
        *("batch_size", "gradient_accumulation_steps", "pretrained", "weights", "early_stopping_patience", "epochs"),
        *("data", "data_root", "download", "workers", "cache", "cache_gb", "bad_images"),
        *("preset", "run_name", "log_dir", "log_every_steps", "progress", "tensorboard", "report", "profile"),
        *("resume", "save_every_steps", "save_every_minutes", "keep_last", "max_bad_steps", "hang_timeout"),
    }
)
FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
FLAG_OF = {name: "--" + name.replace("_", "-") for name in FIELDS}


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the configuration as JSON that `--config` reads back to the same configuration."""
    path.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n", encoding="utf-8")


def check_config(config: TrainConfig, label_of: Mapping[str, str]) -> TrainConfig:
    """Check what needs neither torch nor the data: types, ranges, names, and values that exclude each other.

    Args:
        config: the configuration.
        label_of: the name of each field in a message: its flag, or file and key.

    Raises:
        UserError: for the first value that is wrong.
    """
    for name, field in FIELDS.items():
        value = getattr(config, name)
        if not _is_allowed(value, field):
            raise UserError(f"{label_of[name]} {shown(value)}: expected {allowed_values(field)}.")
    check_model_name(config.model_type)
    if config.strategy not in STRATEGIES:
        raise unknown_name("strategy", config.strategy, STRATEGIES)
    augmentation_of(config, default="crop_flip")
    bad_image_share(config.bad_images)
    given_weights(config.class_weights)
    size_ramp(config.progressive_size)
    if config.compile == "on" and (config.progressive_size or config.eval_image_size):
        raise UserError(
            f"{label_of['compile']} on: images of several sizes are not compiled, leave out "
            f"{label_of['progressive_size']} and {label_of['eval_image_size']}."
        )
    if config.class_weights != "none" and config.sampling == "balanced":
        raise UserError(
            f"{label_of['class_weights']} and {label_of['sampling']} balanced both make up for rare classes: "
            "give one of them."
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
    offloadable = STRATEGIES[config.strategy].offloadable
    if config.offload not in offloadable:
        raise UserError(
            f"{label_of['offload']} {config.offload}: strategy {config.strategy} allows {', '.join(offloadable)}."
        )
    if config.replicate_across == "nodes" and (config.engine != "torch" or STRATEGIES[config.strategy].zero_stage == 1):
        raise UserError(
            f"{label_of['replicate_across']} nodes: only --engine torch does it, at fsdp_stage2 and fsdp_stage3."
        )
    check_optimizer(label_of["optimizer"], config.optimizer, config.strategy, config.engine)
    _check_rules(config, label_of)
    _check_schedule(config, label_of)
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
    has_weights = config.weights or config.pretrained or model_spec(config.model_type).always_pretrained
    if read_tune(config.tune)[0] != "full" and not has_weights and config.resume in ("never", "auto"):
        raise UserError(
            f"{label_of['tune']} {config.tune}: what is not trained would keep random weights: "
            f"add {label_of['pretrained']}, or {label_of['weights']} FILE."
        )
    return config


def _check_rules(config: TrainConfig, label_of: Mapping[str, str]) -> None:
    """Check values that the update rules do not go with; raise UserError."""
    rule = f"{label_of['optimizer']} {config.optimizer}"
    if config.fallback_optimizer not in ELEMENT_WISE:
        raise unknown_name("fallback optimizer", config.fallback_optimizer, ELEMENT_WISE)
    options = {
        name: read_options(label_of[name], getattr(config, name)) for name in ("optimizer_options", "fallback_options")
    }
    momenta = [one.get("momentum", config.momentum) for one in options.values()]
    if config.optimizer in MATRIX_RULES and 0 in momenta:
        raise UserError(f"{rule}: {label_of['momentum']} 0 is for sgd alone: give one above 0, such as 0.95.")
    if config.optimizer in SQUARED_DECAY and config.base_batch_size:
        raise UserError(
            f"{rule} and {label_of['base_batch_size']} exclude each other: its decay refers to --learning-rate itself."
        )


def _check_schedule(config: TrainConfig, label_of: Mapping[str, str]) -> None:
    """Check what belongs to the schedule; raise UserError."""
    if config.schedule not in SCHEDULES:
        raise unknown_name("schedule", config.schedule, SCHEDULES)
    used = 0.0  # epochs of the run
    for name in ("warmup_epochs", "cooldown_epochs", *DECAY_WITHIN_RUN.get(config.schedule, ())):
        used += 0.0 if getattr(config, name) == "auto" else getattr(config, name)
        if used > config.epochs:
            before = "" if used == getattr(config, name) else " with the epochs before it"
            raise UserError(
                f"{label_of[name]} {getattr(config, name)}{before}: the run has {config.epochs} epochs only."
            )
    if config.milestones and not MILESTONES_PATTERN.fullmatch(config.milestones):
        raise UserError(f"{label_of['milestones']} {shown(config.milestones)}: expected epochs such as 30,60,80.")


@cache
def field_types() -> dict[str, Any]:
    """Return each field's type."""
    return get_type_hints(TrainConfig)


def number_type(field: dataclasses.Field) -> type | None:
    """Return int or float for a field that takes a number, None for any other."""
    annotation = field_types()[field.name]
    return next((kind for kind in (int, float) if kind in (annotation, *get_args(annotation))), None)


def allowed_names(field: dataclasses.Field) -> list[str]:
    """Return the names that a field takes: of a `Literal`, or beside a number."""
    annotation = field_types()[field.name]
    parts = [annotation, *get_args(annotation)]
    return [name for part in parts for name in get_args(part) if isinstance(name, str)]


def read_value(field: dataclasses.Field, value: Any) -> Any:
    """Convert a word of the command line, or a value of a file, to the field's type; ranges are checked later.

    Raises:
        ValueError: it cannot be one of the field's values.
    """
    kind, number, names = field_types()[field.name], number_type(field), allowed_names(field)
    if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        text = str(value)  # YAML reads `workers: 2` as a number
        os.fsencode(text)  # raises a ValueError for half a character
        if "\0" in text:
            raise ValueError
        return text
    if isinstance(value, bool):
        value = "on" if value else "off"  # as YAML reads `compile: on`
    if value in names:
        return value
    if kind is bool and isinstance(value, str) and value.lower() in BOOLEANS:
        return BOOLEANS[value.lower()]
    is_read_exactly = isinstance(value, str) or (isinstance(value, int) and abs(value) < 2**63)
    if number and (is_read_exactly or (number is float and isinstance(value, float))):
        return number(value)
    raise ValueError


def _is_allowed(value: Any, field: dataclasses.Field) -> bool:
    try:
        if read_value(field, value) != value:
            return False
    except ValueError:
        return False
    if isinstance(value, (str, bool)):
        return True
    low, high, above = (field.metadata[key] for key in ("low", "high", "above"))
    # Written so that nan is in no range.
    return (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)


def allowed_values(field: dataclasses.Field) -> str:
    """Return the values that a field takes, for a message."""
    kind, number, names = field_types()[field.name], number_type(field), allowed_names(field)
    if number:
        texts = {"above": "above {}", "low": "from {}", "high": "up to {}"}
        bounds = [text.format(field.metadata[key]) for key, text in texts.items() if field.metadata[key] is not None]
        or_names = "".join(f", or {name}" for name in names)
        return " ".join(["a whole number" if number is int else "a number", *bounds]) + or_names
    return " | ".join(names) if names else {bool: "true or false", str: "text"}[kind]
