"""The allowed values of a configuration field, from the command line or a file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from functools import cache
from typing import Any, get_args, get_type_hints

from zerovision.models import hub_name_of
from zerovision.models.sides import ImageSize, read_size, sides
from zerovision.training.base.places import as_typed
from zerovision.training.base.plugins import names_of
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.data.settings import URL

WORDS_OF_LAUNCH = ("model_type", "strategy", "batch_size", "epochs")  # fields that a launcher takes without a flag
# Where a run's files go and how it is watched, which is no part of what is repeated; and its preset, whose values are
# given one by one, because those that were overridden may be the defaults, which are left out.
OF_ONE_RUN = ("preset", "run_name", "log_dir", "progress", "resume", "profile")
NO_PATHS = ("hf:", "torchvision:", "timm:")  # how values of a path's field begin that are none
# The words that YAML 1.1 reads as booleans.
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@cache
def field_types() -> dict[str, Any]:
    """Return each field's type."""
    return get_type_hints(TrainConfig)


def number_type(field: dataclasses.Field) -> type | None:
    """Return int or float for a numeric field, None for any other."""
    annotation = field_types()[field.name]
    return next((kind for kind in (int, float) if kind in (annotation, *get_args(annotation))), None)


def allowed_names(field: dataclasses.Field) -> list[str]:
    """Return the names that a field accepts: of a `Literal`, or besides a number."""
    annotation = field_types()[field.name]
    parts = [annotation, *get_args(annotation)]
    return [name for part in parts for name in get_args(part) if isinstance(name, str)]


def read_value(field: dataclasses.Field, value: Any) -> Any:
    """Convert a command-line word or a file's value to the field's type; ranges are checked later.

    Raises:
        ValueError: if it cannot be a value of the field.
    """
    kind, number, names = field_types()[field.name], number_type(field), allowed_names(field)
    if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        text = str(value)  # YAML reads `workers: 2` as a number
        os.fsencode(text)  # raises a ValueError for half a character
        if "\0" in text:
            raise ValueError
        return text
    if kind == ImageSize and isinstance(value, str):
        return read_size(value)
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


def show_value(value: Any) -> str:
    """Format a value as the command line accepts it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def changed_flags(config: TrainConfig, start: TrainConfig, left_out: Collection[str] = ()) -> list[str]:
    """Return `--flag=value` for each value that differs from another configuration, without launcher arguments."""
    values = {name: getattr(config, name) for name in FLAG_OF if name not in (*WORDS_OF_LAUNCH, *left_out)}
    return [f"{FLAG_OF[name]}={show_value(value)}" for name, value in values.items() if value != getattr(start, name)]


def as_given(config: TrainConfig) -> TrainConfig:
    """Return a configuration that names the hub repository instead of its cached weights."""
    name = hub_name_of(config.weights)
    return dataclasses.replace(config, model_type=name, weights="") if name else config


def without_folders(config: TrainConfig) -> TrainConfig:
    """Return a configuration with only the names of files and folders, for readers on other machines."""
    paths = {one.name: one.default for one in dataclasses.fields(config) if one.metadata.get("is_path")}
    if not config.class_weights.lower().endswith(".csv"):
        del paths["class_weights"]  # which are given themselves, by names of classes
    values = vars(config)
    changed = {name: name_alone(values[name]) for name, default in paths.items() if values[name] != default}
    return TrainConfig(**values | changed | {"plugin": ",".join(names_of(config.plugin))})


def name_alone(value: str) -> str:
    """Return the name at the end of a path, without its folder; a value that is not a path stays as it is."""
    if URL in value or value.startswith(NO_PATHS):
        return value
    kind = "npz:" * value.startswith("npz:")
    return kind + os.path.basename(os.path.abspath(os.path.expanduser(value.removeprefix(kind))))


def launch_command(
    config: TrainConfig, ranks: int, ranks_per_machine: int, left_out: Collection[str] = ()
) -> list[str]:
    """Return the command that trains with a configuration: the launcher, its arguments, and non-default flags.

    Args:
        config: settings of the training.
        ranks: number of ranks over all machines.
        ranks_per_machine: ranks on each machine; there are several machines if this is fewer.
        left_out: fields to leave out.
    """
    config, machines = as_given(config), ranks // max(ranks_per_machine, 1)
    script, sizes = "launch_distributed.sh", [ranks]
    if machines > 1:
        script, sizes = "launch_multi_node.sh", [machines, ranks_per_machine]
    model, strategy, *others = (getattr(config, name) for name in WORDS_OF_LAUNCH)
    words = map(str, (model, strategy, *sizes, *others))
    start = TrainConfig(learning_rate=config.default_rate)
    return [*as_typed(f"bash scripts/{script}").split(), *words, *changed_flags(config, start, left_out)]


def is_allowed(value: Any, field: dataclasses.Field) -> bool:
    """Return whether a value has a field's type and is in its range."""
    try:
        if read_value(field, value) != value:
            return False
    except ValueError:
        return False
    numbers = sides(value) if field_types()[field.name] == ImageSize else (value,)
    if isinstance(numbers[0], (str, bool)):
        return True
    low, high, above = (field.metadata[key] for key in ("low", "high", "above"))
    # Written so that nan is in no range.
    return all(
        (low is None or number >= low) and (above is None or number > above) and (high is None or number <= high)
        for number in numbers
    )


def allowed_values(field: dataclasses.Field) -> str:
    """Return the allowed values of a field, for a message."""
    kind, number, names = field_types()[field.name], number_type(field), allowed_names(field)
    if number:
        texts = {"above": "above {}", "low": "from {}", "high": "up to {}"}
        bounds = [text.format(field.metadata[key]) for key, text in texts.items() if field.metadata[key] is not None]
        or_names = "".join(f", or {name}" for name in names)
        or_names += ", or HEIGHTxWIDTH" if field_types()[field.name] == ImageSize else ""
        return " ".join(["a whole number" if number is int else "a number", *bounds]) + or_names
    return " | ".join(names) if names else {bool: "true or false", str: "text"}[kind]
