"""The settings of a command beside the trainer: a dataclass whose fields are its flags, and its docstring their help.

The functions declare a field as `OneLineParser` takes its value; one without a default must be given.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

from zerovision.training.base.plugins import USAGE, files_in, load_plugins
from zerovision.training.config.command_line import JoinedAction, OneLineParser

END_OF_FLAGS = "--"  # what follows is for another command


def word(metavar: str, help: str, **options: Any) -> Any:
    """Declare a word without a flag."""
    return _declared("add_argument", metavar=metavar, help=help, **options)


def text(help: str, default: Any = "", **options: Any) -> Any:
    """Declare a flag of any text; the options are those of `add_argument`."""
    return _declared("add_argument", default=default, help=help, **options)


def number(default: float | None, low: float, high: float, help: str, kind: str = "") -> Any:
    """Declare a flag of a number (`kind` in messages) from `low` to `high`; None for one that must be given."""
    return _declared("add_number", low, high, kind=kind, help=help, **_given(default))


def choice(default: str | None, names: Iterable[str], help: str) -> Any:
    """Declare a flag of one of the names, which are read when it is checked; None for one that must be given."""
    return _declared("add_choice", names, help=help, **_given(default))


def switch(help: str) -> Any:
    """Declare a flag without a value."""
    return _declared("add_argument", action="store_true", default=False, help=help)


def words_behind() -> Any:
    """Declare the words behind `--`."""
    return dataclasses.field(default=())


def _given(default: Any) -> dict[str, Any]:
    return {"required": True} if default is None else {"default": default}


def _declared(method: str, *values: Any, **options: Any) -> Any:
    metadata = {"method": method, "values": values, "options": options}
    return dataclasses.field(default=options.get("default", dataclasses.MISSING), metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandSettings:
    """What each command's settings can do; `NAME` is that of the command.

    Raises:
        UserError: for a value that its flag would not take.
    """

    NAME: ClassVar = ""

    plugin: str = text(USAGE, action=JoinedAction, metavar="FILE")

    def __post_init__(self) -> None:
        load_plugins(self.plugin)
        parser, fields = self.parser(), dataclasses.fields(self)
        given = {one.name: getattr(self, one.name) for one in fields if flag_of(one.name) in parser.convert}
        parser.check(**{name: value for name, value in given.items() if value != parser.get_default(name)})

    @classmethod
    def parser(cls) -> OneLineParser:
        """Return the parser of the command line."""
        parser = OneLineParser(cls.NAME, inspect.getdoc(cls))
        for field in dataclasses.fields(cls):
            if declared := field.metadata:
                options = declared["options"]
                is_word = "default" not in options and "required" not in options
                name = field.name if is_word else flag_of(field.name)
                getattr(parser, declared["method"])(name, *declared["values"], **options)
        return parser

    @classmethod
    def read(cls, words: Sequence[str]) -> Self:
        """Read the command line.

        Raises:
            UserError: for whatever cannot be parsed.
            SystemExit: after `--help`.
        """
        behind = [field.name for field in dataclasses.fields(cls) if not field.metadata]
        end = words.index(END_OF_FLAGS) if behind and END_OF_FLAGS in words else len(words)
        load_plugins(files_in(words[:end]))  # first: the names that flags take may be theirs
        given = cls.parser().parse(words[:end])
        values = {field.name: getattr(given, field.name) for field in dataclasses.fields(cls) if field.metadata}
        return cls(**values | dict.fromkeys(behind, tuple(words[end + 1 :])))

    def look(self) -> None:
        """Raise a UserError if what the words name is not there: before the slow imports."""


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")
