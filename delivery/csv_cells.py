"""Cells of a CSV file that a spreadsheet shows, and does not compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# What begins a formula, also after a spreadsheet has taken off white space, and in the full width of Chinese and
# Japanese input: https://owasp.org/www-community/attacks/CSV_Injection
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def inert(row: Iterable[Any]) -> list[Any]:
    """Return a row whose texts begin no formula: one that would has a single quote before it; numbers stay."""
    return [f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA_STARTS) else cell for cell in row]
