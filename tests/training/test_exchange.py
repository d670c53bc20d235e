"""Small values between ranks."""

from __future__ import annotations

import pytest

from tests.training.ranks import Ranks
from zerovision.training.world.collectives import broadcast_object, gather_objects
from zerovision.training.world.world import World


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("pair"))
    yield ranks
    ranks.close()


def test_floats_keep_their_bits(pair):
    first, second = pair.run("tests.training.exchange_ranks:exchange_floats", [{}])
    values = [[0.1 + rank, -0.0, 5e-324, 1e308, float("inf"), float("-inf"), float("nan")] for rank in (0, 1, 0)]
    assert first == second == [[[value.hex() for value in row] for row in values]]


def test_small_values_never_wait_for_a_gpu(pair):
    """They travel from CPU to CPU over the gloo group, two messages each, whatever the ranks' own group is."""
    first, second = pair.run("tests.training.exchange_ranks:groups_of_small_values", [{}])
    assert first == second == [[True] * 6]


@pytest.mark.parametrize("exchange", [gather_objects, broadcast_object])
def test_a_value_that_json_does_not_have_is_refused(exchange):
    with pytest.raises(TypeError, match="not JSON serializable"):
        exchange(object(), World(0, 0, 1, 1, None))
