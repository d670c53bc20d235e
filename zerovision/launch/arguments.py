"""The command lines of the three launchers: positional arguments, flags and variables, declared and checked here alone.

Every other flag belongs to the training entry, whose own parser checks it before any rank starts. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from zerovision.training.base.errors import (
    FILE_SERVER_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    FileServerError,
    UserError,
    shown,
)
from zerovision.training.base.heartbeat import end_with_caller
from zerovision.training.base.helper_processes import current_folder_kept_out
from zerovision.training.base.lasting_output import outlast_readers
from zerovision.training.base.places import ENTRIES
from zerovision.training.base.settings import MOST_GPUS_PER_NODE, MOST_NODES, MOST_RANKS
from zerovision.training.config import FIELDS, TrainConfig
from zerovision.training.config.check import check_launched_strategy
from zerovision.training.config.command_line import parse_args
from zerovision.training.engines.deepspeed_config import read_strategy_json

ENTRY = str(ENTRIES / "train_distributed.py")
DOCTOR = str(ENTRIES / "doctor.py")
LARGEST = {"num_nodes": MOST_NODES, "num_gpus": MOST_GPUS_PER_NODE, "gpus_per_node": MOST_GPUS_PER_NODE}
LARGEST |= {name: int(FIELDS[name].metadata["high"]) for name in ("batch_size", "epochs")}
WORD_OF = {"--model-type": "model", "--strategy": "strategy", "--batch-size": "batch_size", "--epochs": "epochs"}


def _setting(default: Any, variable: str = "", smallest: int = 1, largest: int = 0, kind: str = "") -> Any:
    expected = f"a whole number from {smallest} to {largest}" if largest else kind
    return dataclasses.field(
        default=default,
        metadata={"variable": variable, "smallest": smallest, "largest": largest, "expected": expected},
    )


@dataclass(frozen=True)
class LaunchArguments:
    """What a launcher was given.

    The fields with a default are its settings: `max_restarts` is the flag --max-restarts (or --max_restarts), and the
    variable MAX_RESTARTS if the flag is not given.
    """

    script: str  # a key of `LAUNCHERS`
    positional: dict[str, str]  # as given: model, strategy, num_gpus, ...
    flags: list[str]  # of the training entry
    dry_run: bool
    master_port: int = _setting(0, "MASTER_PORT", largest=65535)  # 0: a free one
    max_restarts: int = _setting(3, "MAX_RESTARTS", smallest=0, largest=1000)
    stop_timeout: int = _setting(300, "STOP_TIMEOUT", largest=86400)  # seconds
    start_timeout: int = _setting(300, "START_TIMEOUT", largest=86400)  # seconds
    min_nodes: int = _setting(0, largest=MOST_NODES)  # 0: all
    hostfile: str = _setting("", "HOSTFILE", kind="a file of lines 'name slots=N'")
    hosts: str = _setting("", kind="names with commas")
    forward_env: str = _setting("", "FORWARD_ENV", kind="names of variables with commas")
    gpu: str = _setting("", kind="a GPU's name, such as h100-80gb")
    allow_differences: bool = False
    preflight: bool = False

    @property
    def nodes(self) -> int:
        """Machines to use."""
        return int(self.positional.get("num_nodes", 1))

    @property
    def ranks_per_node(self) -> int:
        """GPUs, or CPU ranks, on each machine."""
        return int(self.positional.get("gpus_per_node") or self.positional["num_gpus"])

    @property
    def training(self) -> list[str]:
        """The arguments of the training entry; the '=' form keeps a value from being read as a flag."""
        given = self.positional
        names = [f"--model-type={given['model']}", f"--strategy={given['strategy']}"]
        return [*names, "--batch-size", given["batch_size"], "--epochs", given["epochs"], *self.flags]

    def command(self, program: str) -> list[str]:
        """Return the command that runs `program` with these arguments, every variable replaced by its flag."""
        command = [sys.executable, program, *self.positional.values()]
        for name in LAUNCHERS[self.script].settings.split():
            value = getattr(self, name)
            if value is True:
                command.append(flag_of(name))
            elif value or value != SETTINGS[flag_of(name)].default:
                command.append(f"{flag_of(name)}={value}")
        return [*command, *self.flags]


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


SETTINGS = {
    flag_of(field.name): field
    for field in dataclasses.fields(LaunchArguments)
    if field.default is not dataclasses.MISSING
}


class Launcher(NamedTuple):
    """The command line of one bash script.

    Attributes:
        positional: names of the leading arguments.
        settings: fields of `LaunchArguments` that it has.
    """

    positional: str
    settings: str


LAUNCHERS = {
    "launch_distributed.sh": Launcher(
        "model strategy num_gpus batch_size epochs",
        "master_port max_restarts stop_timeout gpu preflight",
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
    """Exit with what `main` returns for the command line, or with one line and the code of a known error.

    Gets SIGTERM with the end of whoever called it (`end_with_caller`).
    """
    end_with_caller()
    outlast_readers()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the ranks start, Ctrl-C ends it without a traceback
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE)
    except FileServerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FILE_SERVER_EXIT_CODE)


def read_arguments(script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> LaunchArguments:
    """Read and check the command line of a bash script.

    Args:
        script: a key of `LAUNCHERS`.
        arguments: those of the script.
        environment: the variables; an empty one counts as not set.

    Raises:
        UserError: if an argument of the launcher is missing or out of range, or contradicts another. Else the
            training's are not checked here.
    """
    launcher = LAUNCHERS[script]
    names = launcher.positional.split()
    if len(arguments) < len(names):
        raise UserError(
            f"{len(names)} arguments are needed ({' '.join(names)}), {len(arguments)} given. --help shows examples."
        )
    if flag := next((word for word in arguments[: len(names)] if re.match("--?[a-zA-Z]", word)), ""):
        raise UserError(
            f"{shown(flag)} stands among the first {len(names)} arguments, which are words: {' '.join(names)}. "
            "Flags come after them. --help shows examples."
        )
    positional = dict(zip(names, arguments, strict=False))
    for name in LARGEST.keys() & positional.keys():
        if (name, positional[name]) != ("batch_size", "auto"):
            whole_number(name, positional[name], 1, LARGEST[name], " or auto" if name == "batch_size" else "")
    check_launched_strategy(positional["strategy"])
    settings = {flag_of(name): SETTINGS[flag_of(name)] for name in launcher.settings.split()}
    own, flags = _take_settings(arguments[len(names) :], settings)
    _check_words(positional, flags)
    nodes = int(positional.get("num_nodes", 1))
    values = {}
    for flag, field in settings.items():
        variable = field.metadata.get("variable", "")
        if flag in own:
            values[field.name] = _value(field, flag, own[flag], nodes)
        elif environment.get(variable):
            values[field.name] = _value(field, variable, environment[variable], nodes)
    given = LaunchArguments(script, positional, flags, environment.get("DRY_RUN") == "1", **values)
    threads = environment.get("OMP_NUM_THREADS", "")
    if not re.fullmatch(r"([1-9][0-9]{0,3}(,[1-9][0-9]{0,3})*)?", threads):  # OpenMP would print lines of its own
        raise UserError(f"OMP_NUM_THREADS {shown(threads)}: expected a whole number from 1 to 9999.")
    if not re.fullmatch(r"[A-Za-z0-9_,]*", given.forward_env):
        raise UserError(f"FORWARD_ENV {shown(given.forward_env)}: expected names with commas.")
    if "--hostfile" in own and (environment.get("HOSTFILE") or given.hostfile) != given.hostfile:
        raise UserError(
            f"--hostfile {shown(given.hostfile)}, but HOSTFILE {shown(environment['HOSTFILE'])}: two files, give one."
        )
    return given


def _check_words(positional: Mapping[str, str], flags: Sequence[str]) -> None:
    """Refuse more ranks than there may be, and a flag that gives another value than a word."""
    nodes, gpus = (int(positional.get(name, 1)) for name in ("num_nodes", "gpus_per_node"))
    if nodes * gpus > MOST_RANKS:
        raise UserError(f"num_nodes {nodes} x gpus_per_node {gpus}: expected up to {MOST_RANKS} GPUs.")
    for place, flag in enumerate(flags):
        start, equals, value = flag.partition("=")
        word, value = WORD_OF.get(start), value if equals else "".join(flags[place + 1 : place + 2])
        if word and value.lstrip("0") != positional[word]:
            raise UserError(
                f"{start} {shown(value)}, but the word {word} is {shown(positional[word])}: give the word alone."
            )


def with_flags(script: str, words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return a launcher's line with further flags, FLAG=VALUE each: one that a word gives changes the word."""
    names, line = LAUNCHERS[script].positional.split(), [*words]
    for flag in flags:
        start, _, value = flag.partition("=")
        if start in WORD_OF:
            line[names.index(WORD_OF[start])] = value
        else:
            line.append(flag)
    return line


def whole_number(name: str, text: str, smallest: int, largest: int, other: str = "") -> int:
    """Return a number that was given as text; raise a UserError that names it, and what else it may be."""
    digits = len(str(largest))
    if re.fullmatch(rf"0|[1-9][0-9]{{0,{digits - 1}}}", text) and smallest <= int(text) <= largest:
        return int(text)
    raise UserError(f"{name} {shown(text)}: expected a whole number from {smallest} to {largest}{other}.")


def _value(field: dataclasses.Field, name: str, text: str, nodes: int) -> Any:
    largest = nodes if field.name == "min_nodes" else field.metadata.get("largest")
    return whole_number(name, text, field.metadata["smallest"], largest) if largest else text or True


def _take_settings(
    arguments: Sequence[str], settings: Mapping[str, dataclasses.Field]
) -> tuple[dict[str, str], list[str]]:
    """Split a command line into the launcher's settings by flag (the last one wins) and the training's flags."""
    own: dict[str, str] = {}
    others: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        start, equals, value = argument.partition("=")
        flag = start.replace("_", "-")
        is_switch = flag in settings and settings[flag].default is False
        if flag not in settings or (is_switch and equals):
            others.append(argument)
            continue
        if not is_switch:
            value = value if equals else next(remaining, "")
            if not value:
                raise UserError(f"{start} needs {settings[flag].metadata['expected']}.")
        own[flag] = value
    return own, others


def check_training(arguments: Sequence[str]) -> TrainConfig:
    """Return the configuration that the arguments of the training entry give.

    Raises:
        UserError: for whatever the entry would refuse.
    """
    config, _ = parse_args(arguments)
    read_strategy_json(config.strategy, config.deepspeed_config)
    return config


def run_preflight(given: LaunchArguments, training: Sequence[str], *where: str) -> int:
    """Let the doctor look at the machines if --preflight was given, but not under DRY_RUN; return its exit code."""
    if given.dry_run or not given.preflight:
        return 0
    return subprocess.run(
        [sys.executable, DOCTOR, *where, f"--gpus-per-node={given.ranks_per_node}", "--", *training]
    ).returncode


def print_command(command: Sequence[str]) -> None:
    """Print a command as one line that a shell reads back to the same arguments, whatever bytes they consist of."""
    sys.stdout.flush()
    sys.stdout.buffer.write(b" ".join(os.fsencode(_shell_word(word)) for word in command) + b"\n")


def _shell_word(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    plain = set(range(0x20, 0x7F)) - set(b"\\'")
    return "$'" + "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in os.fsencode(word)) + "'"
