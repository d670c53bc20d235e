"""The settings of a command other than the trainer: a dataclass whose fields are flags and whose docstring is the help.

The functions declare fields for `OneLineParser`; a field without a default is required.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Self

from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.plugins import USAGE, files_in, load_plugins
from zerovision.training.config.command_line import JoinedAction, OneLineParser, training_parser

END_OF_FLAGS = "--"  # the words after it belong to a different command


def word(metavar: str, help: str, **options: Any) -> Any:
    """Declare a positional argument."""
    return declared("add_argument", metavar=metavar, help=help, **options)


def text(help: str, default: Any = "", **options: Any) -> Any:
    """Declare a flag that takes any text; the options are those of `add_argument`."""
    return declared("add_argument", default=default, help=help, **options)


def number(default: float | None, low: float, high: float, help: str, kind: str = "") -> Any:
    """Declare a flag that takes a number (`kind` in messages) from `low` to `high`; required if `default` is None."""
    return declared("add_number", low, high, kind=kind, help=help, **_given(default))


def choice(default: str | None, names: Iterable[str], help: str) -> Any:
    """Declare a flag that takes one of `names`, read when the flag is checked; required if `default` is None."""
    return declared("add_choice", names, help=help, **_given(default))


def switch(help: str) -> Any:
    """Declare a flag without a value."""
    return declared("add_argument", action="store_true", default=False, help=help)


def words_behind(*, takes_trainers: bool = False) -> Any:
    """Declare a field for the words after `--`, and for the trainer's flags if `takes_trainers` is true."""
    return dataclasses.field(default=(), metadata={"takes_trainers": takes_trainers})


def _given(default: Any) -> dict[str, Any]:
    return {"required": True} if default is None else {"default": default}


def declared(method: str, *values: Any, **options: Any) -> Any:
    """Declare a flag with this method of `OneLineParser`, called with these values and options."""
    metadata = {"method": method, "values": values, "options": options}
    return dataclasses.field(default=options.get("default", dataclasses.MISSING), metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandSettings:
    """The base class of each command's settings.

    Raises:
        UserError: for a value that its flag would reject.
    """

    plugin: str = text(USAGE, action=JoinedAction, metavar="FILE")

    def __post_init__(self) -> None:
        load_plugins(self.plugin)
        parser, fields = self.parser(), dataclasses.fields(self)
        given = {one.name: getattr(self, one.name) for one in fields if flag_of(one.name) in parser.convert}
        parser.check(**{name: value for name, value in given.items() if value != parser.get_default(name)})

    @classmethod
    def parser(cls) -> OneLineParser:
        """Return the parser of the command line."""
        parser = OneLineParser("", inspect.getdoc(cls))
        for field in dataclasses.fields(cls):
            if "method" in (declared := field.metadata):
                name = field.name if is_word(field) else flag_of(field.name)
                getattr(parser, declared["method"])(name, *declared["values"], **declared["options"])
        return parser

    @classmethod
    def read(cls, words: Sequence[str]) -> Self:
        """Read the command line.

        Raises:
            UserError: for anything that cannot be parsed.
            SystemExit: after `--help`.
        """
        fields = dataclasses.fields(cls)
        behind = [field for field in fields if "takes_trainers" in field.metadata]
        end = words.index(END_OF_FLAGS) if behind and END_OF_FLAGS in words else len(words)
        load_plugins(files_in(words[:end]))  # first, because plug-ins may define names that flags accept
        parser, others = cls.parser(), list[str]()
        takes_trainers = any(field.metadata["takes_trainers"] for field in behind)
        if takes_trainers:
            given, others = parser.parse_known(words[:end])
        else:
            given = parser.parse(words[:end])
        values = {field.name: getattr(given, field.name) for field in fields if "method" in field.metadata}
        first = [field for field in fields if is_word(field)]
        if others and [*words[: len(first)]] != [values[field.name] for field in first]:
            names = " ".join(field.metadata["options"]["metavar"] for field in first)
            raise UserError(f"{shown(words[0])} comes before {names}: put {names} first, then the flags.")
        rest = (*others, *words[end + 1 :])
        if takes_trainers:
            training_parser().parse(rest, parser.flags)
        return cls(**values | {field.name: rest for field in behind})

    def look(self) -> None:
        """Raise a UserError if a named file or run is missing, before the slow imports."""


def is_word(field: dataclasses.Field) -> bool:
    """Return whether a field is a positional argument."""
    return "method" in field.metadata and not {"default", "required"} & field.metadata["options"].keys()


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")
