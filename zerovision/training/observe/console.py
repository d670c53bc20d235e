"""The console of what trains and evaluates: it draws on terminals alone."""

from __future__ import annotations

import sys

from rich.console import Console


def open_console(*, stderr: bool = False, is_forced: bool = False) -> Console:
    """Return a console that writes plain lines to anything but a terminal.

    By itself rich also draws where FORCE_COLOR is set, which notebooks and CI do, and in notebooks makes HTML of it.

    Args:
        stderr: whether it writes to standard error.
        is_forced: whether to take the stream for a terminal.
    """
    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream is not None and stream.isatty()
    force = True if is_forced else None if is_terminal else False  # None: as rich finds that terminal to be
    return Console(stderr=stderr, force_terminal=force, force_jupyter=False, highlight=False, markup=False, emoji=False)
