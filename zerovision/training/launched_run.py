"""Trains on several ranks from a Python process, such as a notebook, through the launcher."""

from __future__ import annotations

import codecs
import os
import selectors
import subprocess
import sys
from pathlib import Path

from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.heartbeat import CALLER_VARIABLE
from zerovision.training.base.run_folder import LAUNCH
from zerovision.training.base.settings import MOST_GPUS_PER_NODE
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_launched
from zerovision.training.config.file import read_preset
from zerovision.training.config.values import WORDS_OF_LAUNCH, changed_flags
from zerovision.training.world.launchers import environment_for_ranks
from zerovision.training.world.signals import handling_stop_signals

LAUNCHER = [str(LAUNCH / "launch.py"), "launch_distributed.sh"]


def run_launched(config: TrainConfig, gpus: int) -> int:
    """Train on the ranks that scripts/launch_distributed.sh would start, print their output, and return the exit code.

    SIGINT, SIGTERM and SIGUSR1 sent to this process are forwarded to the ranks, which save and stop; they also do so if
    this process dies. If the machine has no GPU, `gpus` is the number of CPU ranks. For the values of the exit code,
    see `zerovision.training.run.run`. Raise a UserError for a wrong value, or if this process is itself a launcher's
    rank.
    """
    if type(gpus) is not int or not 1 <= gpus <= MOST_GPUS_PER_NODE:
        raise UserError(f"gpus {shown(gpus)}: expected a whole number from 1 to {MOST_GPUS_PER_NODE}.")
    check_launched(config, FLAG_OF)
    environment = environment_for_ranks() | {CALLER_VARIABLE: str(os.getpid())}
    # As in an activated environment: an engine compiles its operators with the `ninja` in this folder.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    command = [sys.executable, *LAUNCHER, *launch_words(config, gpus)]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with (
        subprocess.Popen(command, env=environment, stdin=nowhere, stdout=pipe, stderr=pipe) as launcher,
        handling_stop_signals(lambda number, _frame: launcher.send_signal(number)),
    ):
        try:
            _print_lines(launcher)
        except BaseException:  # the lines cannot be printed
            launcher.terminate()
            raise
        code = launcher.wait()
    return code if code >= 0 else 128 - code


def launch_words(config: TrainConfig, gpus: int) -> list[str]:
    """Return the launcher's arguments: the positional ones, and a flag for each other value that is not a default."""
    model, strategy, *sizes = (str(getattr(config, name)) for name in WORDS_OF_LAUNCH)
    start = TrainConfig(**{"learning_rate": config.default_rate} | read_preset(config.preset))
    return [model, strategy, str(gpus), *sizes, *changed_flags(config, start)]


def _print_lines(launcher: subprocess.Popen[bytes]) -> None:
    """Copy the output of the launcher and its ranks to this process's streams, which a notebook may have replaced."""
    with selectors.DefaultSelector() as pipes:
        for pipe, stream in ((launcher.stdout, sys.stdout), (launcher.stderr, sys.stderr)):
            assert pipe is not None
            pipes.register(pipe, selectors.EVENT_READ, (codecs.getincrementaldecoder("utf-8")("replace"), stream))
        while pipes.get_map():
            for key, _ in pipes.select():
                decoder, stream = key.data
                content = os.read(key.fd, 2**16)
                stream.write(decoder.decode(content, final=not content))
                stream.flush()
                if not content:
                    pipes.unregister(key.fileobj)
