"""The command line and the configuration file: default < file < command line, each mistake one line.

jsonargparse parses and checks the types; the fields of `TrainConfig` say the rest. Like `training.config`, this module
imports neither torch nor deepspeed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jsonargparse
import yaml
from yaml.composer import ComposerError

from training.config import FIELDS, FLAG_OF, TrainConfig, check_config, expected, field_types
from training.data.small_files import read_small_text
from training.errors import UserError, nearest, one_line, shown

LARGEST_FILE = 64 * 2**10  # bytes of a configuration file; one with every flag has 3,000
PLAIN_LINES = "expected lines such as 'batch-size: 16', each with one value"


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
    content = _load_file(path, where)
    label_of = {name: f"{where}: {flag[2:]}" for name, flag in FLAG_OF.items()}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in FIELDS:
            hint = nearest(str(key), [flag[2:] for flag in FLAG_OF.values()])
            raise UserError(f"{where}: unknown key '{one_line(key, 60)}'.{hint} `--help` lists all.")
        if name in values:
            raise UserError(f"{where}: key '{key}' is given twice.")
        annotation = field_types()[name]
        if not _is_plain(value) or (annotation is bool and not isinstance(value, bool)):
            raise UserError(f"{label_of[name]} {shown(value)}: expected {expected(FIELDS[name])}.")
        # YAML reads `workers: 2` as a number, where text is meant.
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        values[name] = str(value) if annotation is str and is_number else value
    try:
        parsed = _build_parser().parse_object(values)
    except argparse.ArgumentError as error:
        raise _user_error(error, label_of, values) from None
    empty = next((name for name, value in values.items() if value is None), None)
    if empty:
        raise UserError(f"{label_of[empty]}: has no value; expected {expected(FIELDS[empty])}.")
    check_config(TrainConfig(**{name: parsed[name] for name in FIELDS}), label_of)
    return {name: parsed[name] for name in values}


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
        annotation = field_types()[name]
        if annotation is bool:
            parser.add_argument(FLAG_OF[name], type=bool, nargs="?", const=True, default=field.default, help=help_text)
        elif annotation in (int, float):
            help_text = f"{help_text} Range: {expected(field)}."
            parser.add_argument(FLAG_OF[name], type=annotation, default=field.default, metavar="N", help=help_text)
        else:
            metavar = "TEXT" if annotation is str else None
            parser.add_argument(FLAG_OF[name], type=annotation, default=field.default, metavar=metavar, help=help_text)
    return parser


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
        hint = nearest(value, [word for word in get_args(field_types()[name]) if isinstance(word, str)])
        return UserError(f"{label_of[name]} {shown(value)}: expected {expected(FIELDS[name])}.{hint}")
    flag = re.match(r"argument (--[\w-]+)", message)
    name = flag[1][2:].replace("-", "_") if flag else ""
    if name in FIELDS:
        word = given.get(name)
        return UserError(f"{label_of[name]}{f' {shown(word)}' if word else ''}: expected {expected(FIELDS[name])}.")
    unknown = re.search(r"unrecognized arguments: (.*)", message, re.DOTALL)
    if unknown:
        word = unknown[1].split("=")[0].split(" ")[0]
        hint = nearest(word, FLAG_OF.values()) if word.startswith("--") else ""
        return UserError(f"unknown argument {word!r}.{hint} `--help` lists all flags.")
    return UserError(" ".join(message.split()))


def _load_file(path: Path, where: str) -> dict[Any, Any]:
    """Read a JSON or YAML file that may hold anything: it is read whole, at once, or refused in one line."""
    try:
        text = read_small_text(path, LARGEST_FILE)
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    try:
        content = _parse_json_or_yaml(text)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(
            f"{where}{line}: {PLAIN_LINES if problem == PLAIN_LINES else f'not valid YAML ({one_line(problem)})'}."
        ) from None
    except RecursionError:
        raise UserError(f"{where}: values are nested too deeply; {PLAIN_LINES}.") from None
    except Exception as error:  # what YAML makes numbers, dates and bytes of raises nearly anything
        raise UserError(f"{where}: a value cannot be read ({one_line(error)}).") from None
    if not isinstance(content, dict):
        raise UserError(f"{where}: {PLAIN_LINES}.")
    return content


def _parse_json_or_yaml(text: str) -> Any:
    """Parse a configuration; what JSON can read is JSON, whose pairs of surrogates YAML takes for two characters."""
    if text.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return yaml.load(text, _PlainLoader)  # a safe loader


class _PlainLoader(yaml.SafeLoader):
    """Reads one mapping to plain values; what lies deeper, and aliases, can grow without end while they are read."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse whatever is no scalar, below the top."""
        event = self.peek_event()
        if parent is not None and not isinstance(event, yaml.ScalarEvent):
            raise ComposerError(None, None, PLAIN_LINES, event.start_mark)
        return super().compose_node(parent, index)


def _is_plain(value: Any) -> bool:
    """Whether a value can be one of a flag: a number, text that may be a path, true, false, or nothing."""
    if isinstance(value, str):
        return "\0" not in value and _is_encodable(value)
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is None or isinstance(value, float)


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
