from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope="session")
def largest_difference():
    """The largest absolute difference between two {name: nested list}; the names must be the same."""

    def difference(first: dict, second: dict) -> float:
        assert first.keys() == second.keys()
        return max(float(np.abs(np.array(first[name]) - np.array(second[name])).max()) for name in first)

    return difference
