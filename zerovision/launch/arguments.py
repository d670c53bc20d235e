"""Declares and checks the command lines of the three launchers: positional arguments, flags and environment variables.

All other flags belong to the training entry point, whose parser checks them before any rank starts. This module does
not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from zerovision.training.base.errors import (
    FILE_SERVER_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    FileServerError,
    UserError,
    check_name,
    shown,
)
from zerovision.training.base.heartbeat import end_with_caller
from zerovision.training.base.helper_processes import current_folder_kept_out
from zerovision.training.base.lasting_output import outlast_readers
from zerovision.training.base.run_folder import ENTRIES
from zerovision.training.base.settings import MOST_GPUS_PER_NODE, MOST_NODES, MOST_RANKS
from zerovision.training.config import TrainConfig
from zerovision.training.config.check import LAUNCHED_STRATEGIES
from zerovision.training.config.command_line import OneLineParser, parse_args
from zerovision.training.config.command_settings import declared, flag_of, number, switch
from zerovision.training.config.values import WORDS_OF_LAUNCH
from zerovision.training.engines.settings import check_files

ENTRY = str(ENTRIES / "train_distributed.py")
MOST_OF = {"num_nodes": MOST_NODES, "num_gpus": MOST_GPUS_PER_NODE, "gpus_per_node": MOST_GPUS_PER_NODE}
WORD_OF = {flag_of(name): name.removesuffix("_type") for name in WORDS_OF_LAUNCH}
DAY_SECONDS = 86400


# Settings that are also read from environment variables, such as MAX_RESTARTS.
VARIABLES = ("master_port", "max_restarts", "stop_timeout", "start_timeout", "hostfile", "forward_env")


def _not_empty(word: str) -> str:
    if word:
        return word
    raise ValueError


def _words(expected: str) -> Any:
    """Declare a flag that takes any text except ''; `expected` describes the text in messages."""
    return declared("add_value", _not_empty, expected, default="")


@dataclass(frozen=True)
class LaunchArguments:
    """A launcher's arguments; those with a default are flags, and those in `VARIABLES` also environment variables."""

    script: str  # a key of `LAUNCHERS`
    positional: dict[str, str]  # as typed: model, strategy, num_gpus, ...
    flags: list[str]  # flags of the training entry point
    dry_run: bool
    master_port: int = number(0, 1, 65535, "Port at which the ranks meet; 0: any free port.")
    max_restarts: int = number(3, 0, 1000, "Restarts in a row without a newer checkpoint in between.")
    stop_timeout: int = number(300, 1, DAY_SECONDS, "Seconds that the ranks have to save and stop after a signal.")
    start_timeout: int = number(300, 1, DAY_SECONDS, "Seconds to wait for the machines.")
    min_nodes: int = number(0, 1, MOST_NODES, "Machines that suffice; 0: all.")
    hostfile: str = _words("a file with lines 'name slots=N'")
    hosts: str = _words("names separated by commas")
    forward_env: str = _words("names of variables, separated by commas")
    gpu: str = _words("a GPU's name, such as h100-80gb")
    allow_differences: bool = switch("Start although the machines' versions or code differ.")
    preflight: bool = switch("Run the doctor first, and stop if it finds a problem.")

    @property
    def nodes(self) -> int:
        """Number of machines to use."""
        return int(self.positional.get("num_nodes", 1))

    @property
    def ranks_per_node(self) -> int:
        """Number of GPUs, or CPU ranks, on each machine."""
        return int(self.positional.get("gpus_per_node") or self.positional["num_gpus"])

    @property
    def training(self) -> list[str]:
        """The training entry point's arguments as --flag=value, so that no value can be mistaken for a flag."""
        return [*(f"{flag}={self.positional[word]}" for flag, word in WORD_OF.items()), *self.flags]

    def command(self, program: str) -> list[str]:
        """Return the command that runs `program` with these arguments, using flags instead of environment variables."""
        command = [sys.executable, program, self.script, *self.positional.values()]
        for field in LAUNCHERS[self.script].fields:
            value = getattr(self, field.name)
            if value is True:
                command.append(flag_of(field.name))
            elif value or value != field.default:
                command.append(f"{flag_of(field.name)}={value}")
        return [*command, *self.flags]


SETTINGS = {flag_of(field.name): field for field in dataclasses.fields(LaunchArguments) if field.metadata}


class Launcher(NamedTuple):
    """The command line of one bash script."""

    positional: str  # names of the leading arguments
    settings: str  # names of the fields of `LaunchArguments` that the script accepts

    @property
    def fields(self) -> list[dataclasses.Field]:
        """The fields that declare the launcher's settings."""
        return [SETTINGS[flag_of(name)] for name in self.settings.split()]


LAUNCHERS = {
    "launch_distributed.sh": Launcher(
        "model strategy num_gpus batch_size epochs", "master_port max_restarts stop_timeout gpu preflight"
    ),
    "launch_multi_node.sh": Launcher(
        "model strategy num_nodes gpus_per_node batch_size epochs",
        "master_port max_restarts stop_timeout start_timeout min_nodes hostfile hosts forward_env gpu"
        " allow_differences preflight",
    ),
    "slurm_distributed.sh": Launcher(
        "model strategy num_gpus batch_size epochs",
        "master_port max_restarts stop_timeout gpu allow_differences preflight",
    ),
}


@current_folder_kept_out()
def run_launcher(main: Callable[[list[str]], int]) -> NoReturn:
    """Run `main` on the command line and exit with its result; print an expected error as one line and exit with its
    code.

    The process receives SIGTERM when its caller exits (`end_with_caller`).
    """
    end_with_caller()
    outlast_readers()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the ranks start, Ctrl-C exits without a traceback
    try:
        if sys.argv[-2:] == ["--help", "all"]:
            check_training(sys.argv[-2:])  # prints the flags, and exits
        sys.exit(main(sys.argv[1:]))
    except (UserError, FileServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE if isinstance(error, UserError) else FILE_SERVER_EXIT_CODE)


def read_arguments(script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> LaunchArguments:
    """Read and check the command line of a bash script.

    Args:
        script: a key of `LAUNCHERS`.
        arguments: the script's arguments.
        environment: the environment variables; an empty variable is treated as unset.

    Raises:
        UserError: if an argument of the launcher is missing, is out of range, or contradicts another argument.
            Arguments of the training entry point are not checked here.
    """
    launcher = LAUNCHERS[script]
    names = launcher.positional.split()
    if flag := next((word for word in arguments[: len(names)] if re.match("--?[a-zA-Z]|--$", word)), ""):
        raise UserError(
            f"{shown(flag)} is among the first {len(names)} arguments, which must be {' '.join(names)}: put flags "
            "after them. --help shows examples."
        )
    words = vars(_word_parser(launcher).parse(["--", *arguments[: len(names)]]))
    positional = {name: str(value) for name, value in words.items()}
    check_name("strategy", positional["strategy"], LAUNCHED_STRATEGIES)
    of_variables = [
        f"{flag_of(field.name)}={value}"
        for field in launcher.fields
        if field.name in VARIABLES and (value := environment.get(field.name.upper()))
    ]
    given, flags = setting_parser(launcher).parse_known([*of_variables, *map(_with_dashes, arguments[len(names) :])])
    _check_words(positional, flags)
    is_dry = environment.get("DRY_RUN") == "1" or "--check-config" in flags
    found = LaunchArguments(script, positional, flags, is_dry, **vars(given))
    if found.min_nodes > found.nodes:
        raise UserError(f"--min-nodes {found.min_nodes}: expected a whole number from 1 to {found.nodes}.")
    threads = environment.get("OMP_NUM_THREADS", "")
    if not re.fullmatch(r"([1-9][0-9]{0,3}(,[1-9][0-9]{0,3})*)?", threads):  # OpenMP would print messages of its own
        raise UserError(f"OMP_NUM_THREADS {shown(threads)}: expected a whole number from 1 to 9999.")
    if not re.fullmatch(r"[A-Za-z0-9_,]*", found.forward_env):
        raise UserError(f"FORWARD_ENV {shown(found.forward_env)}: expected names separated by commas.")
    if found.hostfile and environment.get("HOSTFILE") not in (None, "", found.hostfile):
        said = f"--hostfile is {shown(found.hostfile)}, but HOSTFILE is {shown(environment['HOSTFILE'])}"
        raise UserError(f"{said}: use only one of them.")
    return found


def _word_parser(launcher: Launcher) -> OneLineParser:
    parser = OneLineParser("launch", None)
    for name in launcher.positional.split():
        if name in MOST_OF:
            parser.add_number(name, 1, MOST_OF[name])
        else:
            parser.add_argument(name)
    return parser


def setting_parser(launcher: Launcher) -> OneLineParser:
    """Return the parser of a launcher's flags."""
    parser = OneLineParser("launch", None)
    for field in launcher.fields:
        flag, (method, values, options) = flag_of(field.name), field.metadata.values()
        getattr(parser, method)(flag, *values, **options | {"default": argparse.SUPPRESS})
        if field.name in VARIABLES:
            parser.expected[flag] += f" (also read from {field.name.upper()})"
    return parser


def _with_dashes(word: str) -> str:
    """Return a launcher's flag with dashes in place of underscores; return any other word unchanged."""
    start, equals, value = word.partition("=")
    flag = start.replace("_", "-")
    return flag + equals + value if flag in SETTINGS else word


def _check_words(positional: Mapping[str, str], flags: Sequence[str]) -> None:
    """Reject too many ranks, and a flag that contradicts a positional argument."""
    nodes, gpus = (int(positional.get(name, 1)) for name in ("num_nodes", "gpus_per_node"))
    if nodes * gpus > MOST_RANKS:
        raise UserError(f"num_nodes {nodes} x gpus_per_node {gpus}: expected at most {MOST_RANKS} GPUs.")
    for place, flag in enumerate(flags):
        start, equals, value = flag.partition("=")
        word, value = WORD_OF.get(start), value if equals else "".join(flags[place + 1 : place + 2])
        if word and value.lstrip("0") != positional[word]:
            raise UserError(
                f"{start} is {shown(value)}, but the {word} argument is {shown(positional[word])}: leave {start} out."
            )


def with_flags(script: str, words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return a launcher's command line with flags added, each in the form FLAG=VALUE.

    A flag that corresponds to a positional argument changes that argument instead.
    """
    names, line = LAUNCHERS[script].positional.split(), [*words]
    for flag in flags:
        start, _, value = flag.partition("=")
        if start in WORD_OF:
            line[names.index(WORD_OF[start])] = value
        else:
            line.append(flag)
    return line


def check_training(arguments: Sequence[str]) -> TrainConfig:
    """Return the configuration that the arguments of the training entry point describe.

    Raises:
        UserError: for anything that the entry point would reject.
    """
    config, _ = parse_args(arguments)
    check_files(config)
    return config


def print_command(command: Sequence[str]) -> None:
    """Print a command as one line that a shell parses into the same arguments, whatever bytes they contain."""
    sys.stdout.flush()
    sys.stdout.buffer.write(b" ".join(os.fsencode(_shell_word(word)) for word in command) + b"\n")


def _shell_word(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    plain = set(range(0x20, 0x7F)) - set(b"\\'")
    return "$'" + "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in os.fsencode(word)) + "'"
