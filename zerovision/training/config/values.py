"""Converts, checks and shows the values of configuration fields, from the command line or a file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Mapping
from functools import cache
from string import ascii_uppercase
from typing import Any, get_args, get_type_hints

from zerovision.models import ImageSize, hub_name_of, read_size, sides
from zerovision.training.base.errors import UserError, either, nearest, ours, plain, shown
from zerovision.training.base.plugins import names_of
from zerovision.training.base.run_folder import as_typed
from zerovision.training.config import FIELDS, FLAG_OF, WORDS, TrainConfig
from zerovision.training.data.settings import URL

WORDS_OF_LAUNCH = ("model_type", "strategy", "batch_size", "epochs")  # fields that a launcher takes by position
# Settings that a repetition of a run does not need: where the run's files are, how the run is watched, and its preset.
# The preset's values are listed one by one instead: with the preset, a default that overrides one of its values would
# be lost, because defaults are omitted.
OF_ONE_RUN = ("preset", "run_name", "log_dir", "progress", "resume", "profile")
NO_PATHS = ("hf:", "torchvision:", "timm:")  # prefixes of values in path fields that are not paths
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@cache
def field_types() -> dict[str, Any]:
    """Return each field's type."""
    return get_type_hints(TrainConfig)


def number_type(field: dataclasses.Field) -> type | None:
    """Return int or float for a numeric field, or None for any other field."""
    annotation = field_types()[field.name]
    return next((kind for kind in (int, float) if kind in (annotation, *get_args(annotation))), None)


def allowed_names(field: dataclasses.Field) -> list[str]:
    """Return the names that a field accepts: the values of a `Literal`, or alternatives to a number."""
    annotation = field_types()[field.name]
    parts = [annotation, *get_args(annotation)]
    return [name for part in parts for name in get_args(part) if isinstance(name, str)]


def read_value(field: dataclasses.Field, value: Any) -> Any:
    """Convert a word, or a value of JSON or Python, to the field's type, or raise ValueError.

    Ranges are checked later.
    """
    kind, number, names = field_types()[field.name], number_type(field), allowed_names(field)
    text = str(value)
    if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        os.fsencode(text)  # raises a ValueError for a lone surrogate
        if "\0" in text:
            raise ValueError
        return text
    if (switch := BOOLEANS.get(text.lower())) is not None:
        if kind is bool:
            return switch
        text = "on" if switch else "off"  # `compile: true`
    if text in names:
        return text
    if kind == ImageSize:
        return read_size(text)
    if number:
        return number(text)
    raise ValueError


def show_value(value: Any) -> str:
    """Format a value as the command line accepts it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parts_after(name: str, value: Any) -> list[str]:
    """Return the fields whose values may follow a field's value in its flag's word."""
    after = {part: FIELDS[part].metadata["part_of"][1] for part in WORDS.get(name, ())[1:]}
    return [part for part, first in after.items() if not first or value in first.split(",")]


def read_words(words: Mapping[str, Any], label_of: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of fields from the words of a command line or a file, or from the arguments of a call.

    Parts of a word that are omitted or empty have their defaults.

    Args:
        words: the word of each field's flag; a part that has its own key takes precedence over the part in the word.
        label_of: each field's name in messages.

    Raises:
        UserError: for the first value that is wrong.
    """
    values: dict[str, Any] = {}
    for name in sorted(words, key=lambda name: name not in WORDS):
        parts, texts = [name], [words[name]]
        if isinstance(words[name], str):
            parts += parts_after(name, words[name].partition(":")[0])
            texts = words[name].split(":", len(parts) - 1)
        values |= {part: FIELDS[part].default for part in WORDS.get(name, ())}
        for part, text in zip(parts, texts, strict=False):
            if text != "" or len(texts) == 1:
                values[part] = checked(part, label_of[part], text)
    return values


def checked(name: str, label: str, value: Any) -> Any:
    """Return a value as its field's type, or raise a UserError that begins with the label if it is not allowed."""
    field = FIELDS[name]
    with contextlib.suppress(ValueError):
        value = read_value(field, value)
        if is_allowed(value, field):
            return value
    raise wrong_value(label, value, allowed_values(field), allowed_names(field))


def word_of(values: Mapping[str, Any], name: str) -> str:
    """Return the word of a flag for the values of its field and of the field's parts."""
    texts = [show_value(values[name])]
    for part in parts_after(name, values[name]):
        texts.append("" if values[part] == FIELDS[part].default else show_value(values[part]))
    while len(texts) > 1 and not texts[-1]:
        texts.pop()
    return ":".join(texts)


def changed_flags(config: TrainConfig, start: TrainConfig, left_out: Collection[str] = ()) -> list[str]:
    """Return `--flag=value` for each value that differs from `start`, except the launcher's positional arguments."""
    own, others = vars(config), vars(start)
    changed = [name for name, parts in WORDS.items() if any(own[part] != others[part] for part in parts)]
    return [f"{FLAG_OF[name]}={word_of(own, name)}" for name in changed if name not in (*WORDS_OF_LAUNCH, *left_out)]


def as_given(config: TrainConfig) -> TrainConfig:
    """Return a configuration that names the hub repository instead of its cached weights."""
    name = hub_name_of(config.weights)
    return dataclasses.replace(config, model_type=name, weights="") if name else config


def without_folders(config: TrainConfig) -> TrainConfig:
    """Return a configuration with paths shortened to the names of files and folders, for readers on other machines."""
    paths = {one.name: one.default for one in dataclasses.fields(config) if one.metadata.get("is_path")}
    if not config.class_weights.lower().endswith(".csv"):
        del paths["class_weights"]  # here, the value consists of the weights themselves, by class name
    values = vars(config)
    changed = {name: name_alone(values[name]) for name, default in paths.items() if values[name] != default}
    return TrainConfig(**values | changed | {"plugin": ",".join(names_of(config.plugin))})


def name_alone(value: str) -> str:
    """Return the name at the end of a path, without its folder; a value that is not a path is returned unchanged."""
    if URL in value or value.startswith(NO_PATHS):
        return value
    kind = "npz:" * value.startswith("npz:")
    return kind + os.path.basename(os.path.abspath(os.path.expanduser(value.removeprefix(kind))))


def launch_command(
    config: TrainConfig, ranks: int, ranks_per_machine: int, left_out: Collection[str] = ()
) -> list[str]:
    """Return the command that trains with a configuration: the launcher, its arguments, and non-default flags.

    Args:
        config: settings of the run.
        ranks: number of ranks over all machines.
        ranks_per_machine: number of ranks on each machine; if it is less than `ranks`, there are several machines.
        left_out: fields to leave out.
    """
    config, machines = as_given(config), ranks // max(ranks_per_machine, 1)
    script, sizes = "launch_distributed.sh", [str(ranks)]
    if machines > 1:
        script, sizes = "launch_multi_node.sh", [str(machines), str(ranks_per_machine)]
    model, strategy, *others = (word_of(vars(config), name) for name in WORDS_OF_LAUNCH)
    flags = changed_flags(config, TrainConfig(learning_rate=config.default_rate), left_out)
    return [*as_typed(f"bash scripts/{script}").split(), model, strategy, *sizes, *others, *flags]


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
    # Written so that NaN is outside every range.
    return all(
        (low is None or number >= low) and (above is None or number > above) and (high is None or number <= high)
        for number in numbers
    )


def allowed_values(field: dataclasses.Field) -> str:
    """Return the allowed values of a field, for a message."""
    kind, number, names = field_types()[field.name], number_type(field), allowed_names(field)
    if number:
        most = "to {}" if field.metadata["above"] is None else "and at most {}"
        texts = {"above": "above {}", "low": "from {}", "high": most}
        bounds = [text.format(field.metadata[key]) for key, text in texts.items() if field.metadata[key] is not None]
        or_names = "".join(f", or {name}" for name in names)
        or_names += ", or HEIGHTxWIDTH" if field_types()[field.name] == ImageSize else ""
        return " ".join(["a whole number" if number is int else "a number", *bounds]) + or_names
    return either(names) if names else {bool: "true or false", str: "text"}[kind]


def wrong_value(label: str, value: object, allowed: str, names: Collection[str]) -> UserError:
    """Build the error for a value that a flag or a key in a file does not accept."""
    kind = plain(label.rstrip(f"{ascii_uppercase}_ ").rpartition(" ")[2]).replace("-", "_")  # without a part's name
    word = value if isinstance(value, str) else shown(value)  # shown: Python does not format a number of 5000 digits
    hint = ours(word, names, kind) or (nearest(value, names) if isinstance(value, str) else "")
    return UserError(f"{label} {shown(value)}: expected {allowed}.{hint}")
