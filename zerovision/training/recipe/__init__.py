"""How weights are updated: what is tuned, optimizers, schedules, and steps that are not finite.

Importing this module imports no torch: the command line reads its words with it.
"""

from __future__ import annotations

import re

from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.settings import TUNE_USAGE


def read_tune(word: str) -> tuple[str, int]:
    """Return what `--tune` names, 'full', 'head', 'layers' or 'lora', and its number, 0 if it has none.

    Raises:
        UserError: for any other word.
    """
    kind, _, number = word.partition(":")
    if word in ("full", "head") or (kind in ("layers", "lora") and re.fullmatch(r"[1-9][0-9]{0,2}", number)):
        return kind, int(number or 0)
    raise UserError(f"--tune {shown(word)}: expected {TUNE_USAGE}, such as lora:8; N and R are from 1 to 999.")
