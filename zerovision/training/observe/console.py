"""The console for training and evaluation, which draws only on terminals."""

from __future__ import annotations

import sys

from rich.console import Console


def open_console(*, stderr: bool = False, is_forced: bool = False) -> Console:
    """Return a console that writes plain lines to anything but a terminal.

    By default rich also draws if FORCE_COLOR is set, as in notebooks and CI, and produces HTML in notebooks.

    Args:
        stderr: whether it writes to standard error.
        is_forced: whether to treat the stream as a terminal.
    """
    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream is not None and stream.isatty()
    force = True if is_forced else None if is_terminal else False  # None: as rich finds that terminal to be
    return Console(stderr=stderr, force_terminal=force, force_jupyter=False, highlight=False, markup=False, emoji=False)
