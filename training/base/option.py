"""How a field of the configuration is declared."""

from __future__ import annotations

import dataclasses
from typing import Any


def option(
    default: Any, help: str, *, low: float | None = None, high: float | None = 10**9, above: float | None = None
) -> Any:
    """Declare a field with its help text and its range.

    Args:
        default: the value if neither file nor command line gives one.
        help: one sentence with the unit.
        low: smallest allowed value, itself included.
        high: largest allowed value, itself included.
        above: lower bound, itself excluded.
    """
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high, "above": above})
