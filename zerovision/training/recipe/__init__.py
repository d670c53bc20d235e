"""How weights are updated: what is tuned, optimizers, schedules, and steps that are not finite.

Importing this module imports no torch: the command line reads its words with it.
"""

from __future__ import annotations

import re

from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.settings import TUNE_USAGE

MOST_TEMPERATURE = 100


def read_tune(word: str) -> tuple[str, int]:
    """Return what `--tune` names, 'full', 'head', 'layers' or 'lora', and its number, 0 if it has none.

    Raises:
        UserError: for any other word.
    """
    kind, _, number = word.partition(":")
    if word in ("full", "head") or (kind in ("layers", "lora") and re.fullmatch(r"[1-9][0-9]{0,2}", number)):
        return kind, int(number or 0)
    raise UserError(f"--tune {shown(word)}: expected {TUNE_USAGE}, such as lora:8; N and R are from 1 to 999.")


def read_distill(word: str) -> tuple[float, float]:
    """Return the temperature of `--distill kl:T[:ALPHA]`, and the share of the teacher's answers in the loss.

    Raises:
        UserError: for any other word.
    """
    kind, *numbers = word.split(":")
    if kind == "kl" and 1 <= len(numbers) <= 2 and all(re.fullmatch(r"\d{1,3}(\.\d{1,6})?", one) for one in numbers):
        temperature, share = float(numbers[0]), float((*numbers, "1")[1])
        if 0 < temperature <= MOST_TEMPERATURE and 0 < share <= 1:
            return temperature, share
    raise UserError(
        f"--distill {shown(word)}: expected kl:T, or kl:T:ALPHA with a share of the teacher, such as kl:4 or kl:4:0.9; "
        f"T is up to {MOST_TEMPERATURE}, ALPHA up to 1, both above 0."
    )
