"""Durations, sizes and counts as people read them."""

from __future__ import annotations

import pytest

from zerovision.training.base.units import format_bytes, format_duration, plural

DURATIONS = {
    0: "0 s",
    0.0015: "1.5 ms",
    0.32: "320 ms",
    0.9999: "1 s",
    7.309: "7.31 s",
    45.0: "45 s",
    59.96: "1 min 00 s",
    200: "3 min 20 s",
    3599.6: "1 h 00 min",
    7500: "2 h 05 min",
    273_600: "3 d 04 h",
}
SIZES = {
    0: "0 B",
    999: "999 B",
    1000: "1 kB",
    999_600: "1 MB",
    12_340_000: "12.3 MB",
    1.234e9: "1.23 GB",
    5e15: "5e+03 TB",
}


@pytest.mark.parametrize(("seconds", "text"), DURATIONS.items())
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), SIZES.items())
def test_sizes(count, text):
    assert format_bytes(count) == text


def test_counts():
    assert [plural(count, "class") for count in (0, 1, 2000)] == ["0 classes", "1 class", "2,000 classes"]
    assert [plural(count, "step") for count in (1, 2)] == ["1 step", "2 steps"]
