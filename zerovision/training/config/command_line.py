"""The command lines of all scripts: argparse with one-line errors.

The fields of `TrainConfig` declare the trainer's flags. A value comes from the command line, the file, the
preset or the defaults, in this order of precedence. Like `zerovision.training.config`, this module imports only the
standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from zerovision.models import HUB_PREFIX, ImageSize
from zerovision.training.base.errors import (
    FILE_SERVER_EXIT_CODE,
    RANK_0_MESSAGE_SECONDS,
    USER_ERROR_EXIT_CODE,
    FileServerError,
    UserError,
    either,
    nearest,
    ours,
    plain,
    shown,
)
from zerovision.training.base.helper_processes import current_folder_kept_out
from zerovision.training.base.lasting_output import ReaderGone, report_failed_output
from zerovision.training.base.plugins import load_plugins
from zerovision.training.base.run_folder import as_typed, cure_of_missing
from zerovision.training.base.units import number_in
from zerovision.training.config import FIELDS, FLAG_OF, WORDS, TrainConfig, part_name
from zerovision.training.config.check import check_config, check_launched
from zerovision.training.config.saved import saved_and_given
from zerovision.training.config.values import (
    allowed_names,
    allowed_values,
    field_types,
    number_type,
    read_words,
    show_value,
    word_of,
    wrong_value,
)

Parsed = TypeVar("Parsed")
USUAL = {  # the flags that `--help` shows
    *("preset", "data", "path_column", "label_column", "task", "val_fraction", "image_size", "augmentation", "mixup"),
    *("cutmix", "workers", "cache", "model_type", "pretrained", "weights", "tune", "epochs", "batch_size"),
    *("learning_rate", "optimizer", "weight_decay", "schedule", "label_smoothing", "class_weights", "ema", "best_by"),
    *("global_batch", "strategy", "precision", "compile", "seed", "run_name", "log_dir", "resume", "loggers"),
}
DATA_EXTENSIONS = (".csv", ".tsv", ".parquet", ".tar")


class JoinedAction(argparse.Action):
    """Joins the values of a repeated flag with commas."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, "")
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are `UserError`s that say what was given, what is allowed, and the nearest name.

    The help shows `name` as the name of the script or, if `name` is '', the command that was typed.
    """

    def __init__(self, name: str, description: str | None) -> None:
        super().__init__(
            as_typed(f"scripts/{name}.py").removeprefix("scripts/") if name else None,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            exit_on_error=False,
        )
        self.expected: dict[str, str] = {}  # by flag: the allowed values, for messages
        self.convert: dict[str, Callable[[str], Any]] = {}  # by flag

    def format_help(self) -> str:
        """Return the help, with commands as the user types them."""
        return as_typed(super().format_help())

    def add_value(
        self, flag: str, read: Callable[[str], Any], expected: str, names: Sequence[str] = (), **options: Any
    ) -> None:
        """Add a flag that takes one value.

        Args:
            flag: the flag, with its dashes.
            read: function that converts the word, or raises ValueError if the word is not allowed.
            expected: the allowed values, for the message.
            names: allowed names; an error suggests the nearest one.
            options: further arguments of `add_argument`.
        """

        def convert(word: str) -> Any:
            if word == options.get("default"):  # argparse also converts the default
                return word
            try:
                return read(word)
            except ValueError:
                raise wrong_value(flag, word, self.expected[flag], names) from None

        self.expected[flag], self.convert[flag] = expected, convert
        self.add_argument(flag, type=convert, **options)

    def add_number(self, flag: str, low: float, high: float, *, kind: str = "", **options: Any) -> None:
        """Add a flag that takes a number (`kind` in messages) from `low` to `high`, an integer if `low` is an int."""
        kind = kind or ("a whole number" if type(low) is int else "a number")
        read = partial(number_in, low=low, high=high)
        self.add_value(flag, read, f"{kind} from {low:.10g} to {high:.10g}", **options)

    def add_choice(self, flag: str, names: Iterable[str], **options: Any) -> None:
        """Add a flag that takes one of `names`."""
        names = [*names]
        metavar = f"{{{','.join(names)}}}"
        self.add_value(flag, lambda word: names[names.index(word)], either(names), names, metavar=metavar, **options)

    def add_local_rank(self) -> None:
        """Add the flag with which other launchers pass a rank's number, which is also in the environment."""
        self.add_value("--local_rank", int, "a whole number", help=argparse.SUPPRESS)

    @property
    def flags(self) -> list[str]:
        """The names of all flags."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def parse(self, words: Sequence[str], others: Iterable[str] = ()) -> argparse.Namespace:
        """Return the parsed command line; a message may also suggest a flag of another parser, from `others`.

        Raises:
            UserError: for anything that cannot be parsed.
            SystemExit: after `--help`.
        """
        given, unknown = self.parse_known(words)
        if unknown:
            word, equals, _ = unknown[0].partition("=")
            flags = [*self.flags, *others]
            hint, path = "", os.path.expanduser(word)
            if word.startswith("-") or equals:  # Ultralytics writes imgsz=224
                names = [*flags, *(str(action.metavar or action.dest) for action in self._get_positional_actions())]
                hint = ours(word, names) or nearest(plain(word), flags)
            elif os.path.isdir(path) or (os.path.isfile(path) and path.lower().endswith(DATA_EXTENSIONS)):
                flag = next((flag for flag in ("--check-data", "--data") if flag in flags), "")
                hint = f" Did you mean {flag} {shlex.quote(word)}?" if flag else ""
            self.error(f"unknown argument {shown(word)}.{hint}")
        return given

    def parse_known(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the values of known arguments, and the unknown words; for errors, see `parse`."""
        for name, equals, value in (word.partition("=") for word in words):
            action = self._option_string_actions.get(name)
            if equals and value == "--" and action and action.nargs != 0:  # argparse would turn it into an empty list
                raise wrong_value(name, value, self.expected.get(name, "text other than '--'"), ())
        try:
            return self.parse_known_args(words)
        except argparse.ArgumentError as error:
            flag = error.argument_name
            if flag not in self.expected:
                self.error(str(error))
            # `convert` raises its own errors, so an error from argparse can only mean that the value is missing.
            following = words[words.index(flag) + 1 :][:1] if flag in words else ()
            value = "".join(f" {shown(word)}" for word in following)
            raise UserError(f"{flag}{value}: expected {self.expected[flag]}.") from None

    def check(self, **values: object) -> None:
        """Check a function's arguments, by name, in the same way as the values of flags.

        Raises:
            UserError: for the first value that is wrong.
        """
        for name, value in values.items():
            flag = f"--{name.replace('_', '-')}"
            with contextlib.suppress(UserError, ValueError):  # Python does not format integers of 4301 digits
                if self.convert[flag](str(value)) == value:
                    continue
            raise wrong_value(flag, value, self.expected[flag], ())

    def error(self, message: str) -> NoReturn:
        """Raise a UserError with this message, which `run_script` prints."""
        raise UserError(f"{message}{'' if message[-1] in '.?' else '.'} `--help all` lists all flags.")


@current_folder_kept_out()
def run_script(
    name: str, parse: Callable[[list[str]], Parsed], action: Callable[[Parsed], int], *, writes_product: bool = False
) -> int:
    """Parse the command line, run the action, and return the exit code.

    After a user error, print one line on rank 0 and return 2; if a file server does not respond, print a line and
    return 75.

    Args:
        name: name of the script, the prefix of its messages.
        parse: function that turns the command line into values; may raise SystemExit.
        action: function that does the work and returns the exit code.
        writes_product: whether standard output is the script's only product, so that the script ends with its reader.
    """
    if sys.stdout is sys.__stdout__:  # the trainer has replaced it, to outlast its reader
        report_failed_output(is_product=writes_product)
    try:
        return action(parse(sys.argv[1:]))
    except ReaderGone:
        return 0
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":  # every rank finds the error
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(RANK_0_MESSAGE_SECONDS)
        return USER_ERROR_EXIT_CODE
    except FileServerError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return FILE_SERVER_EXIT_CODE
    except ModuleNotFoundError as error:
        cure = cure_of_missing(error.name or "")
        print(f"{name}: {sys.executable} has no module {error.name!r}: {cure}.", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except KeyboardInterrupt:
        print(f"{name}: stopped by Ctrl-C", file=sys.stderr)
        return 130


def parse_args(argv: Sequence[str], others: Iterable[str] = ()) -> tuple[TrainConfig, bool]:
    """Read the trainer's command line, and its configuration file, into a checked configuration.

    Args:
        argv: the arguments.
        others: other existing flags, which messages may suggest.

    Returns:
        The configuration, and whether to only check it (`--check-config`).

    Raises:
        UserError: for anything unknown, of the wrong type or out of range; the message is one line.
        SystemExit: after `--help`.
    """
    given = vars(training_parser(hides_rare="all" not in argv).parse(argv, others))
    flags = read_words({name: word for name, word in given.items() if name in WORDS}, FLAG_OF)
    if given["deepspeed"]:
        flags.setdefault("deepspeed_config", given["deepspeed"])
    values, preset, label_of = dict[str, Any](), dict[str, Any](), FLAG_OF
    if given["config"] or "preset" in flags:
        from zerovision.training.config.file import labels_of, read_config_file, read_preset  # need PyYAML

        if given["config"]:
            file = Path(given["config"])
            values, labels = read_config_file(file), labels_of(f"--config {file}")
            label_of = FLAG_OF | {name: labels[name] for name in values.keys() - flags}
        preset = read_preset(flags.get("preset") or values.get("preset", ""))
    return settled(values | flags, preset, label_of), given["check_config"]


def settled(
    values: dict[str, Any], preset: Mapping[str, Any], label_of: Mapping[str, str], *, is_launched: bool = False
) -> TrainConfig:
    """Return the checked configuration that results from the given values, the resumed run, and a preset.

    Args:
        values: the given values, by field.
        preset: the result of `read_preset`.
        label_of: see `check_config`.
        is_launched: whether a launcher will start the ranks, and may choose the strategy.

    Raises:
        UserError: for the first value that is wrong.
    """
    if values.get("plugin"):
        values["plugin"] = load_plugins(values["plugin"])
    settings = saved_and_given(values, preset)
    try:
        config = (check_launched if is_launched else check_config)(_named(settings), label_of)
    except UserError as error:
        of_preset = {name: value for name, value in preset.items() if name not in values}
        raise UserError(f"{error}{_override_hint(str(error), values, of_preset, label_of)}") from None
    if "learning_rate" not in settings:
        config = replace(config, learning_rate=config.default_rate)
    return config


def _named(values: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration in which a hub repository is replaced by its network's name and its weights."""
    config = TrainConfig(**values)
    if not config.model_type.startswith(HUB_PREFIX):
        return config
    from zerovision.models.timm_models import of_hub  # the import takes a second

    name, weights = of_hub(config.model_type, config.weights, wants_weights=values.get("pretrained", True))
    return replace(config, model_type=name, weights=weights, pretrained=False)


def _override_hint(
    message: str, values: Mapping[str, Any], of_preset: Mapping[str, Any], label_of: Mapping[str, str]
) -> str:
    """Return a sentence with the flag that overrides a preset's value named in `message`, if that fixes the mistake."""

    def subject(text: str) -> str:
        return max((label for label in label_of.values() if text.startswith(label)), key=len, default=text)

    words = [word.rstrip(".,:;") for word in message.split()]
    # A preset's learning rates are for its optimizer: the preset with a different optimizer is a different recipe.
    for name in [name for name in of_preset if FLAG_OF[name] in words and name != "optimizer"]:
        changed = {**of_preset, **values} | {part: FIELDS[part].default for part in WORDS[name]}
        try:
            check_config(TrainConfig(**changed), label_of)
        except UserError as error:
            if subject(str(error)) == subject(message):
                continue
        word = word_of(changed, name) or "''"
        return f" It is set by preset {values['preset']}: to override it, add {FLAG_OF[name]} {word}."
    return ""


def training_parser(*, hides_rare: bool = False) -> OneLineParser:
    """Return the parser of the trainer's flags; its result contains the words of the given flags, and no others.

    Args:
        hides_rare: whether the help shows only the flags in `USUAL`.
    """
    parser = OneLineParser("train_distributed", "Train an image classifier on any number of GPUs, or CPU ranks.")
    if hides_rare:
        parser.epilog = "These are the flags that most trainings need: `--help all` shows all of them."
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags override it.")
    parser.add_argument("--check-config", action="store_true", help="Check the configuration and stop.")
    parser.add_local_rank()
    use = "The same as --deepspeed-config FILE, for scripts written for DeepSpeed; alone, it changes nothing."
    parser.add_value("--deepspeed", str, "text", nargs="?", const="", default="", metavar="FILE", help=use)
    parser.add_value("--deepspeed_config", str, "text", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for name, parts in WORDS.items():
        options: dict[str, Any] = {"nargs": "?", "const": "true"} if field_types()[name] is bool else {}
        if name == "plugin":
            options["action"] = JoinedAction
        texts = [f"{part_name(part)}: {_help_of(part)}" for part in parts[1:]]
        use = " ".join([_help_of(name), *texts]).replace("%", "%%")
        options |= {"metavar": _form(name), "help": argparse.SUPPRESS if hides_rare and name not in USUAL else use}
        parser.add_value(FLAG_OF[name], str, allowed_values(FIELDS[name]), default=argparse.SUPPRESS, **options)
    return parser


def _form(name: str) -> str:
    """Return the syntax of a flag's word, such as ram|disk|off[:GB]."""
    more = {bool: ["true", "false"], ImageSize: ["HxW"], str: ["TEXT"]}.get(field_types()[name], [])
    forms = dict.fromkeys([*["N"] * bool(number_type(FIELDS[name])), *allowed_names(FIELDS[name]), *more], "")
    for part in reversed(WORDS[name][1:]):
        for first in FIELDS[part].metadata["part_of"][1].split(","):
            forms[first] = f"[:{part_name(part)}{forms.get(first, '')}]"
    return "|".join(first + form for first, form in forms.items() if first) + forms.get("", "")


def _help_of(name: str) -> str:
    """Return the help of a field, with its range and its default."""
    field = FIELDS[name]
    # For any other field, the flag's syntax shows the allowed values.
    is_told = number_type(field) or (name not in WORDS and allowed_names(field))
    text = field.metadata["help"] + (f" Range: {allowed_values(field)}." if is_told else "")
    return f"{text} (default: {show_value(field.default)})" if field.default != "" else text
