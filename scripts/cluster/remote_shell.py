"""The commands that start a program on other machines.

A remote shell reads what ssh and pdsh are given, so only fixed words of ours go there, quoted; whatever a user gives
(arguments, variables, folders) travels on the program's standard input or over a socket.
"""

from __future__ import annotations

import shlex

CONNECT_SECONDS = 10
# An ssh whose other end is silent ends after ALIVE_SECONDS x ALIVE_COUNT seconds.
ALIVE_SECONDS, ALIVE_COUNT = 5, 3


def ssh_command(host: str, words: list[str]) -> list[str]:
    """Return the command that runs `words` on `host`, never asks for a password, and ends when the host is silent.

    Args:
        host: a name that `training.hostfile` has accepted: it cannot be read as an option.
        words: the program and its arguments.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ServerAliveInterval": ALIVE_SECONDS,
        "ServerAliveCountMax": ALIVE_COUNT,
    }
    given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *given, "--", host, "exec " + shlex.join(words)]
