"""Writes the pages of docs/reference/ that the code itself determines: `python -m tests.pages`."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import zerovision
from zerovision.cli import VERBS
from zerovision.commands import COMMANDS
from zerovision.training.base.run_folder import SCRIPTS
from zerovision.training.config import FIELDS, FLAG_OF, WORDS, TrainConfig, part_name
from zerovision.training.config.command_line import OneLineParser
from zerovision.training.config.values import allowed_values, show_value

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
USAGE = ROOT / "zerovision" / "launch" / "usage"
WRITTEN = "<!-- Written by `python -m tests.pages`: edit the code that it describes. -->"
GROUPS = {  # headings, by the classes that declare the flags
    "RunSettings": "Model, length and batch",
    "DataFields": "Data and augmentation",
    "LossSettings": "Loss",
    "TeacherSettings": "Teacher",
    "TaskSettings": "Targets and scores",
    "RecipeSettings": "Optimizer and schedule",
    "ShardingSettings": "Strategy and engine",
    "TensorSettings": "Tensor parallelism",
    "PipelineSettings": "Pipelines",
    "IslandSettings": "Local steps",
    "DeepSpeedSettings": "DeepSpeed",
    "CheckpointSettings": "Checkpoints and failures",
    "ObserveSettings": "Output",
}


class _Built(Exception):
    """Carries the parser that a command has built."""


def parser_of(name: str) -> OneLineParser:
    """Return the parser of a command, as it is when it begins to parse."""

    def parse(parser: OneLineParser, _words: list[str]) -> None:
        raise _Built(parser)

    with mock.patch.object(OneLineParser, "parse_known", parse):
        try:
            COMMANDS[name].parse([])
        except _Built as built:
            return built.args[0]
    raise AssertionError(f"{name} does not parse with OneLineParser")


def table(rows: Iterator[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield the lines of a table of flags."""
    yield "| flag | values | default | |"
    yield "|---|---|---|---|"
    for row in rows:
        cells = [" ".join(cell.split()).replace("|", "\\|").replace("<", "&lt;") for cell in row]
        yield f"| {' | '.join(cells)} |"
    yield ""


def trainer_rows(names: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of fields of `TrainConfig`, each flag before the parts that its word may have."""
    for whole in (name for name in names if name in WORDS):
        for name in WORDS[whole]:
            default, first = show_value(FIELDS[name].default), FIELDS[name].metadata["part_of"][1]
            flag = f"`{FLAG_OF[name]}`" if name == whole else f"`{first}:{part_name(name)}`"
            yield flag, allowed_values(FIELDS[name]), f"`{default}`" if default else "", FIELDS[name].metadata["help"]


def command_rows(parser: OneLineParser) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of the arguments of a command."""
    for action in parser._actions:
        if action.dest == "help" or action.help == argparse.SUPPRESS:
            continue
        name = ", ".join(action.option_strings) or str(action.metavar)
        values = "" if action.nargs == 0 else parser.expected.get(name, "text")
        default = "" if action.default in (None, "", False, argparse.SUPPRESS) else f"`{action.default}`"
        text = re.sub(r" \(default:? [^()]*\)", "", (action.help or "").replace("%%", "%"))
        yield f"`{name}`", values, "required" if action.required else default, text % {"default": action.default}


def flags_page() -> str:
    """Return the page of all flags."""
    lines = ["# Flags", "", WRITTEN, ""]
    lines += ["`python scripts/train_distributed.py --help all` prints all training flags in the terminal.", ""]
    lines += ["A flag's name without the leading dashes is also its key in a YAML file for `--config`.", ""]
    lines += [
        "A row such as `:GB` below `--cache` is an optional part of that flag's value: `--cache ram:8`. Write the "
        "parts in the order of the rows. A part that you omit, or leave empty as in `4::blocks.3`, takes its default. "
        "A row such as `supcon:TEMPERATURE` is a part of the value `supcon` only.",
        "",
    ]
    lines += ["## Training", ""]
    for owner, heading in GROUPS.items():
        (declares,) = [one for one in TrainConfig.__mro__ if one.__name__ == owner]
        lines += [f"### {heading}", "", *table(trainer_rows([*inspect.get_annotations(declares)]))]
    lines += ["## Launchers", ""]
    for file in sorted(USAGE.glob("*.txt")):
        lines += [f"### {file.stem}", "", "```text", file.read_text(encoding="utf-8").rstrip(), "```", ""]
    for verb in VERBS:
        name = SCRIPTS.get(verb, verb)
        if name in COMMANDS:
            lines += [f"## {verb}", "", f"`zerovision {verb}`, or `python scripts/{name}.py` in a checkout.", ""]
            lines += table(command_rows(parser_of(name)))
    return "\n".join(lines).rstrip() + "\n"


def sections(docstring: str) -> Iterator[str]:
    """Yield the Markdown of a docstring of Google's form."""
    for line in inspect.cleandoc(docstring).splitlines():
        heading = re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields):", line)
        item = re.fullmatch(r"    (\w+): (.*)", line)
        if heading:
            yield f"**{'Arguments' if heading[1] == 'Args' else heading[1]}**\n"
        elif item:
            yield f"- `{item[1]}`: {item[2]}"
        else:
            yield re.sub(r"^ {4,8}(?=\S)", "  " if line.startswith(" " * 8) else "", line)


def members(thing: type) -> Iterator[str]:
    """Yield what a class of ours offers: its fields and public methods, a line each."""
    if "Attributes:" not in (thing.__doc__ or ""):
        for name, annotation in inspect.get_annotations(thing).items():
            yield f"- `{name}: {annotation}`"
    for name, member in vars(thing).items():
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            summary = (inspect.getdoc(member) or "").splitlines()[:1]
            yield f"- `{name}{'()' if inspect.isfunction(member) else ''}`: {''.join(summary)}"


def python_page() -> str:
    """Return the page of what `import zerovision` offers."""
    lines = ["# Python", "", WRITTEN, ""]
    offered = {name: getattr(zerovision, name) for name in sorted(zerovision.__all__)}
    for name, thing in offered.items():
        if not callable(thing):
            continue
        # Annotations are strings, which a signature quotes.
        shown = "" if inspect.isclass(thing) else re.sub(r"(: |-> )'([^']+)'", r"\1\2", str(inspect.signature(thing)))
        lines += [f"## {name}", "", "```text", f"zerovision.{name}{shown}", "```", ""]
        lines += [*sections(thing.__doc__ or ""), ""]
        if inspect.isclass(thing) and thing is not TrainConfig:
            lines += [*members(thing), ""]
    lines += ["## Tables", "", "A file for `--plugin` adds entries to these tables.", ""]
    lines += [f"- `zerovision.{name}`" for name, thing in offered.items() if not callable(thing)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


PAGES = {REFERENCE / "flags.md": flags_page, REFERENCE / "python.md": python_page}


if __name__ == "__main__":
    for page, write in PAGES.items():
        page.write_text(write(), encoding="utf-8")
