"""The configuration file of `--config`: YAML or JSON, one value per line, with one-line errors."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from zerovision.training.base.errors import UserError, check_name, nearest, one_line, ours, plain
from zerovision.training.base.files import read_small_text
from zerovision.training.base.settings import PRESET_FOLDER, PRESETS
from zerovision.training.config import FIELDS, FLAG_OF, WORDS
from zerovision.training.config.values import allowed_values, read_words

LARGEST_FILE = 64 * 2**10  # bytes of a configuration file; a file with every flag has 3,000
PLAIN_LINES = "expected lines such as 'batch-size: 16', each with one value"


def read_preset(name: str) -> dict[str, Any]:
    """Return the values of a preset, or {} for an empty name.

    Raises:
        UserError: if no preset has this name.
    """
    if not name:
        return {}
    check_name("preset", name, PRESETS)
    return read_config_file(PRESET_FOLDER / f"{name}.yaml")


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a YAML (or JSON) file of configuration values; its keys are flags (`batch-size`) or fields (`batch_size`).

    Contradictions are found later, after flags have overridden some of the values; see `check_config`.

    Raises:
        UserError: if the file is missing or malformed, a key is unknown, or a value is wrong.
    """
    where = f"--config {path}"
    return read_values(_load_file(path, where), where)


def labels_of(where: str) -> dict[str, str]:
    """Return the name that messages use for each field of a file."""
    return {name: f"{where}: {flag.replace('--', '')}" for name, flag in FLAG_OF.items()}


def read_values(content: dict[Any, Any], where: str) -> dict[str, Any]:
    """Return the values in a file, by field.

    Args:
        content: the values in the file, by key.
        where: name of the file in messages.

    Raises:
        UserError: if a key is unknown, or a value is wrong.
    """
    label_of = labels_of(where)
    given: dict[str, Any] = {}
    names = {str(key).replace("-", "_") for key in content}
    # The configuration file that a run writes also contains keys for the parts of a word.
    keys = {part for name, parts in WORDS.items() for part in (parts if name in names else [name])}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in keys:
            flags = [FLAG_OF[name] for name in WORDS]
            hint = (ours(str(key), flags) or nearest(plain(str(key)), [flag[2:] for flag in flags])).replace(" --", " ")
            raise UserError(f"{where}: unknown key '{one_line(key, 60)}'.{hint} `--help all` lists all flags.")
        if name in given:
            raise UserError(f"{where}: key '{key}' occurs more than once.")
        if value is None:
            raise UserError(f"{label_of[name]} has no value: expected {allowed_values(FIELDS[name])}.")
        given[name] = value
    return read_words(given, label_of)


def _load_file(path: Path, where: str) -> dict[Any, Any]:
    """Read an untrusted JSON or YAML file, or reject it with a one-line error."""
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
            f"{where}{line}: {problem if problem == PLAIN_LINES else f'not valid YAML ({one_line(problem)})'}."
        ) from None
    except RecursionError:
        raise UserError(f"{where}: values are nested too deeply; {PLAIN_LINES}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{where}: {PLAIN_LINES}.")
    return content


def _parse_json_or_yaml(text: str) -> Any:
    """Parse a configuration, as JSON if possible, because YAML reads a surrogate pair in JSON as two characters."""
    if text.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return yaml.load(text, _PlainLoader)


class _PlainLoader(yaml.BaseLoader):
    """Reads a single mapping to words, as on a command line.

    Nested structures and aliases are rejected, because they could grow without limit while they are read.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Reject everything but scalars below the top level."""
        event = self.peek_event()
        if parent is not None and not isinstance(event, yaml.ScalarEvent):
            raise ComposerError(None, None, PLAIN_LINES, event.start_mark)
        return super().compose_node(parent, index)
