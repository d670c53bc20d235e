"""Every flag of every script, with its values and its default, is a line of tests/references/flags.txt.

A change of the command line is a decision: after it, write the file anew and read its diff.

    .venv/bin/python -m tests.unit.test_flags > tests/references/flags.txt
"""

from __future__ import annotations

import runpy
import sys
from argparse import Action, Namespace
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.kit import ROOT
from zerovision.training.base.errors import UserError
from zerovision.training.config import FIELDS, FLAG_OF, WORDS, part_name
from zerovision.training.config.command_line import USUAL, OneLineParser, parse_args, training_parser
from zerovision.training.config.values import allowed_values

REFERENCE = ROOT / "tests" / "references" / "flags.txt"
UPDATE = ".venv/bin/python -m tests.unit.test_flags > tests/references/flags.txt"


class _Built(Exception):
    """Carries the parser that a script has built."""


def parser_of(script: str) -> OneLineParser:
    """Return the parser of a script, as it is when the script begins to parse."""
    if script == "train_distributed":
        return training_parser()

    parse_known = OneLineParser.parse_known

    def parse(parser: OneLineParser, words: list[str]) -> tuple[Namespace, list[str]]:
        words_and_flags = [*parser.flags, *parser._get_positional_actions()]
        if words_and_flags == ["--help", "--plugin"]:  # read before there is a parser of the rest
            return parse_known(parser, words)
        raise _Built(parser)

    with mock.patch.object(OneLineParser, "parse_known", parse), mock.patch.object(sys, "argv", [script]):
        try:
            runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")
        except _Built as built:
            return built.args[0]
    raise AssertionError(f"scripts/{script}.py does not parse with OneLineParser")


def describe(script: str, parser: OneLineParser, action: Action) -> str:
    """Return the line of one flag or positional argument: its values and its default."""
    name = ", ".join(action.option_strings) or str(action.metavar)
    values = "no value" if action.nargs == 0 else parser.expected.get(name, "text")
    default = FIELDS[action.dest].default if script == "train_distributed" and action.dest in FIELDS else action.default
    needed = "required" if action.required else f"default {default!r}"
    several = {"?": ", or no value", "+": ", one or more"}.get(str(action.nargs), "")
    return f"{script} {name}: {values}{several}; {needed}"


def describe_parts(flag: str) -> Iterator[str]:
    """Yield a line for each part of a word that may follow a value of a flag of the trainer: what it may follow."""
    for name in WORDS.get(flag.lstrip("-").replace("-", "_"), ())[1:]:
        field, after = FIELDS[name], FIELDS[name].metadata["part_of"][1] or "any"
        values = f"{allowed_values(field)}; default {field.default!r}"
        yield f"train_distributed {flag}, after {after}, {part_name(name)}: {values}"


def lines() -> Iterator[str]:
    for script in sorted(path.stem for path in (ROOT / "scripts").glob("*.py")):
        parser = parser_of(script)
        for action in parser._actions:
            if action.dest != "help":
                yield describe(script, parser, action)
                if script == "train_distributed":
                    yield from describe_parts("".join(action.option_strings))


def test_every_flag_is_as_the_reference_has_it() -> None:
    found, expected = list(lines()), REFERENCE.read_text(encoding="utf-8").splitlines()
    new, gone = sorted({*found} - {*expected}), sorted({*expected} - {*found})
    assert found == expected, f"the command line changed; if that is meant: {UPDATE}\nnew: {new}\ngone: {gone}"


def test_help_shows_what_most_trainings_need_and_all_of_it_if_asked(capsys) -> None:
    shown, flags = [], [FLAG_OF[name] for name in WORDS]
    for words in (["--help"], ["--help", "all"]):
        with pytest.raises(SystemExit) as end:
            parse_args(words)
        assert end.value.code == 0
        help_ = capsys.readouterr().out
        shown.append([flag for flag in flags if f"\n  {flag} " in help_])
    usual, every = shown
    assert every == flags
    assert len(flags) <= 101  # 105 with --config, --check-config and DeepSpeed's two
    assert {*usual} == {FLAG_OF[name] for name in USUAL}
    assert len(usual) < 40
    with pytest.raises(UserError, match=r"^--dropout 2.0: expected "):
        parse_args(["--dropout", "2"])


if __name__ == "__main__":
    print("\n".join(lines()))
