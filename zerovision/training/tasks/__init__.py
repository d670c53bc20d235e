"""What is learned of the images: of one class each, of several, by comparison, or from a teacher.

Importing this module imports no torch: the command line reads its words with it.
"""

from __future__ import annotations

import re

from zerovision.training.base.errors import UserError, shown

MOST_TEMPERATURE = 100


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
