"""How weights are updated: tuning, optimizers and schedules.

Importing this module does not import torch, because the command line uses it.
"""

from __future__ import annotations

import re

from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.settings import TUNE_USAGE


def read_tune(word: str) -> tuple[str, int]:
    """Return the mode of `--tune` ('full', 'head', 'layers' or 'lora') and its number, which is 0 if it has none.

    Raises:
        UserError: for any other value.
    """
    kind, _, number = word.partition(":")
    if word in ("full", "head") or (kind in ("layers", "lora") and re.fullmatch(r"[1-9][0-9]{0,2}", number)):
        return kind, int(number or 0)
    raise UserError(f"--tune {shown(word)}: expected {TUNE_USAGE}, such as lora:8; N and R are from 1 to 999.")
