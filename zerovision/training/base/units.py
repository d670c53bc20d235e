"""Readable durations, sizes and counts, for the console, the logs, the doctor and the report; numbers from users."""

from __future__ import annotations


def number_in(word: str, low: float, high: float) -> float:
    """Parse a number from `low` to `high`, both inclusive; it is an int if `low` is an int.

    Raises:
        ValueError: if `word` is not such a number.
    """
    value = type(low)(word)
    if not low <= value <= high:  # NaN is in no range
        raise ValueError
    return value


def format_duration(seconds: float) -> str:
    """Format a duration in seconds: 320 ms, 7.31 s, 3 min 20 s, 2 h 05 min, 3 d 04 h."""
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def format_bytes(count: float) -> str:
    """Format a number of bytes with three significant digits and a decimal prefix: 999 B, 12.3 MB, 1.05 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def percent(share: float) -> str:
    """Format a score in 0..1 as a percentage, as in all commands: 97.50 %."""
    return f"{100 * share:.2f} %"


def plural(count: int, noun: str) -> str:
    """Format a count and its noun: 1 step, 2,000 steps, 2 classes."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def cpu_ranks(count: int) -> str:
    """Return a phrase for the ranks on a machine without GPUs."""
    return "1 CPU process" if count == 1 else f"{count} CPU ranks over gloo"
