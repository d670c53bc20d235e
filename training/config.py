"""The configuration of a run: one frozen dataclass from which the command line, `--help` and the YAML file follow.

The order is default < file < command line; jsonargparse parses and checks the types. This module imports neither
torch nor deepspeed, so that `--help` and a launcher's check of the arguments cost a fraction of a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import jsonargparse
import yaml

from models import MODELS, check_model_name
from training.data import AUGMENTATIONS, DATASETS
from training.errors import UserError, nearest, unknown_name
from training.strategies import STRATEGIES

REPO_ROOT = Path(__file__).resolve().parents[1]
RUN_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def option(
    default: Any, help: str, *, low: float | None = None, high: float | None = 10**9, above: float | None = None
) -> Any:
    """Declare a field with its sentence for `--help` and its range.

    Args:
        default: the value where neither file nor command line gives one.
        help: one sentence with the unit.
        low: smallest allowed value, itself included.
        high: largest allowed value, itself included.
        above: lower bound, itself excluded.
    """
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high, "above": above})


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run. Field `batch_size` is the flag `--batch-size`, and so on."""

    # What is trained, and how it is sharded.
    model_type: str = option("mobilenet", f"Model: one of {', '.join(MODELS)}, or timm:<name> for any timm model.")
    strategy: str = option("ddp", f"How training state is sharded: {', '.join(STRATEGIES)}.")
    epochs: int = option(30, "Passes over the training data.", low=1, high=100_000)
    batch_size: int = option(16, "Images per GPU (or CPU rank) and micro-step.", low=1, high=65_536)
    gradient_accumulation_steps: int = option(
        1, "Micro-steps per optimizer step; BatchNorm still sees single micro-batches.", low=1, high=4096
    )
    learning_rate: float = option(1e-3, "Peak learning rate, before scaling by --base-batch-size.", above=0, high=100)

    # Model.
    pretrained: bool = option(False, "Start from the model's published weights (needs a network or a warm cache).")
    weights: str = option("", "Start from this local file: safetensors, or a pickle of plain tensors.")
    ensemble_members: str = option("mobilenet,efficientnet,vgg", "Members of --model-type ensemble, comma-separated.")
    head_epochs: int = option(
        2, "mobilenet_finetuned: epochs in which only the new head learns, before all layers do.", low=0, high=100_000
    )
    backbone_learning_rate_scale: float = option(
        0.1, "mobilenet_finetuned: learning rate of the backbone as a share of the head's.", above=0, high=1
    )
    activation_checkpointing: bool = option(False, "Recompute activations in backward: less memory, more time.")
    sync_batchnorm: bool = option(False, "BatchNorm statistics over all ranks' samples instead of each rank's own.")

    # Optimizer and schedule.
    optimizer: Literal["adamw", "sgd", "lamb"] = option("adamw", "Update rule; sgd has Nesterov momentum.")
    weight_decay: float = option(0.05, "Decoupled decay of weights; biases and norms have none.", low=0, high=10)
    momentum: float = option(0.9, "Momentum of sgd.", low=0, high=0.9999)
    gradient_clipping: float = option(1.0, "Largest global gradient norm (L2); 0 switches clipping off.", low=0)
    label_smoothing: float = option(0.1, "Share of each target spread over all classes.", low=0, high=0.99)
    warmup_epochs: float = option(1.0, "Epochs of linear warm-up from 0 to the peak learning rate.", low=0)
    final_learning_rate_scale: float = option(
        0.01, "Learning rate at the end of the cosine, as a share of the peak.", low=0, high=1
    )
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
    image_size: int = option(0, "Side of the square images, in pixels; 0: the data set's own.", low=0, high=4096)
    augmentation: str = option("auto", f"Training augmentation: {', '.join(AUGMENTATIONS)}.")
    workers: str = option("auto", "Loader processes per rank: a whole number, or auto.")
    bad_images: Literal["error", "skip"] = option("error", "What to do with unreadable images; skip allows 0.1 %.")

    # What a run leaves.
    run_name: str = option("", "Name of the run's folders; default: date, model, strategy.")
    log_dir: str = option("", "Folder of all logs; default: logs/ beside scripts/.")
    log_every_steps: int = option(10, "Optimizer steps between two log points.", low=1)
    progress: Literal["auto", "bar", "lines", "off"] = option("auto", "Console progress; auto: a bar on a terminal.")
    tensorboard: bool = option(True, "Write TensorBoard event files.")
    resume: str = option(
        "never", "never, auto (newest checkpoint of --run-name, if any), must, or a checkpoint folder."
    )


FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
FLAG_OF = {name: "--" + name.replace("_", "-") for name in FIELDS}


def parse_args(argv: Sequence[str]) -> tuple[TrainConfig, bool]:
    """Read the command line, and the file that it names, into a checked configuration.

    Returns:
        The configuration, and whether only its check was asked for (`--check-config`).

    Raises:
        UserError: for anything unknown, of the wrong type or out of range, in one line.
        SystemExit: after `--help`.
    """
    parser = _build_parser()
    given = _parse(parser, argv)
    if given.config:
        parser.set_defaults(read_config_file(Path(given.config)))
        given = _parse(parser, argv)
    config = TrainConfig(**{name: given[name] for name in FIELDS})
    return check_config(config, FLAG_OF), given.check_config


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a YAML (or JSON) file of configuration values; keys as flags (`batch-size`) or as fields (`batch_size`).

    Raises:
        UserError: where the file is missing or malformed, or a key is unknown or its value wrong.
    """
    where = f"--config {path}"
    content = _load_yaml(path, where)
    label_of = {name: f"{where}: {flag[2:]}" for name, flag in FLAG_OF.items()}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in FIELDS:
            hint = nearest(str(key), [flag[2:] for flag in FLAG_OF.values()])
            raise UserError(f"{where}: unknown key '{key}'.{hint} `--help` lists all.")
        if name in values:
            raise UserError(f"{where}: key '{key}' is given twice.")
        annotation = _annotations()[name]
        if annotation is bool and not isinstance(value, bool):
            raise UserError(f"{label_of[name]} {value!r}: expected true or false.")
        # YAML reads `workers: 2` as a number, where text is meant.
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        values[name] = str(value) if annotation is str and is_number else value
    try:
        parsed = _build_parser().parse_object(values)
    except argparse.ArgumentError as error:
        raise _user_error(error, label_of, values) from None
    empty = next((name for name, value in values.items() if value is None), None)
    if empty:
        raise UserError(f"{label_of[empty]}: has no value; expected {_expected(FIELDS[empty])}.")
    check_config(TrainConfig(**{name: parsed[name] for name in FIELDS}), label_of)
    return {name: parsed[name] for name in values}


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the configuration as JSON that `--config` reads back to the same configuration."""
    path.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n", encoding="utf-8")


def check_config(config: TrainConfig, label_of: Mapping[str, str]) -> TrainConfig:
    """Check what needs neither torch nor the data: ranges, names, and values that exclude each other.

    Args:
        config: the configuration.
        label_of: what to call each field in a message: its flag, or file and key.

    Raises:
        UserError: for the first value that is wrong.
    """
    for name, field in FIELDS.items():
        value = getattr(config, name)
        if _annotations()[name] in (int, float) and not _is_in_range(value, field):
            raise UserError(f"{label_of[name]} {value}: expected {_expected(field)}.")
    check_model_name(config.model_type)
    if config.strategy not in STRATEGIES:
        raise unknown_name("strategy", config.strategy, STRATEGIES)
    if config.augmentation not in AUGMENTATIONS:
        raise unknown_name("augmentation", config.augmentation, AUGMENTATIONS)
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
    if config.warmup_epochs > config.epochs:
        raise UserError(f"{label_of['warmup_epochs']} {config.warmup_epochs}: the run has {config.epochs} epochs only.")
    if config.weights and config.pretrained:
        raise UserError(f"{label_of['weights']} and {label_of['pretrained']} exclude each other: give one of them.")
    return config


@cache
def _annotations() -> dict[str, Any]:
    return get_type_hints(TrainConfig)


def _build_parser() -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(
        prog="train_distributed.py",
        description="Train an image classifier on any number of GPUs, or CPU ranks.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=str, metavar="FILE", help="YAML file of the values below; flags win over it.")
    parser.add_argument("--check-config", action="store_true", help="Check the configuration and stop.")
    # The deepspeed launcher adds this to every rank's command line; the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    for name, field in FIELDS.items():
        help_text = field.metadata["help"]
        annotation = _annotations()[name]
        if annotation is bool:
            parser.add_argument(FLAG_OF[name], type=bool, nargs="?", const=True, default=field.default, help=help_text)
        elif annotation in (int, float):
            help_text = f"{help_text} Range: {_expected(field)}."
            parser.add_argument(FLAG_OF[name], type=annotation, default=field.default, metavar="N", help=help_text)
        else:
            metavar = "TEXT" if annotation is str else None
            parser.add_argument(FLAG_OF[name], type=annotation, default=field.default, metavar=metavar, help=help_text)
    return parser


def _is_in_range(value: float, field: dataclasses.Field) -> bool:
    low, high, above = (field.metadata[key] for key in ("low", "high", "above"))
    # Written so that nan is in no range.
    return (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)


def _expected(field: dataclasses.Field) -> str:
    annotation = _annotations()[field.name]
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "text"
    if annotation not in (int, float):
        return " | ".join(get_args(annotation))
    texts = {"above": "above {}", "low": "from {}", "high": "up to {}"}
    bounds = [text.format(field.metadata[key]) for key, text in texts.items() if field.metadata[key] is not None]
    return " ".join(["a whole number" if annotation is int else "a number", *bounds])


def _parse(parser: jsonargparse.ArgumentParser, argv: Sequence[str]) -> jsonargparse.Namespace:
    try:
        return parser.parse_args(list(argv))
    except argparse.ArgumentError as error:
        raise _user_error(error, FLAG_OF, _words_after_flags(argv)) from None


def _words_after_flags(argv: Sequence[str]) -> dict[str, str]:
    """Map each field named on the command line to the word given for it, to quote it in a message."""
    words = {}
    for position, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        if name in FIELDS:
            words[name] = value if equals else next(iter(argv[position + 1 : position + 2]), "")
    return words


def _user_error(error: argparse.ArgumentError, label_of: Mapping[str, str], given: Mapping[str, Any]) -> UserError:
    """Turn what the parser says into one line: what was given, what is allowed."""
    message = str(error)
    key = re.search(r'Parser key "(\w+)"', message)
    if key and key[1] in FIELDS:
        name, value = key[1], str(given.get(key[1], ""))
        hint = nearest(value, get_args(_annotations()[name]))
        return UserError(f"{label_of[name]} {value!r}: expected {_expected(FIELDS[name])}.{hint}")
    flag = re.match(r"argument (--[\w-]+)", message)
    name = flag[1][2:].replace("-", "_") if flag else ""
    if name in FIELDS:
        word = given.get(name)
        return UserError(f"{label_of[name]}{f' {word!r}' if word else ''}: expected {_expected(FIELDS[name])}.")
    unknown = re.search(r"unrecognized arguments: (.*)", message, re.DOTALL)
    if unknown:
        word = unknown[1].split("=")[0].split(" ")[0]
        hint = nearest(word, FLAG_OF.values()) if word.startswith("--") else ""
        return UserError(f"unknown argument {word!r}.{hint} `--help` lists all flags.")
    return UserError(" ".join(message.split()))


def _load_yaml(path: Path, where: str) -> dict[Any, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{where}{line}: not valid YAML ({getattr(error, 'problem', None) or error}).") from None
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected lines such as 'batch-size: 16'.")
    return content
