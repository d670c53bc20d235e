"""Small values between ranks: what a false rank sends is refused, and never run."""

from __future__ import annotations

import pytest

from tests.training.hostile_ranks import KINDS
from tests.training.ranks import Ranks
from zerovision.training.world.exchange import (
    ForeignMessageError,
    as_received,
    flag,
    list_of,
    optional,
    row_of,
    text,
    whole_number,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("pair"))
    yield ranks
    ranks.close()


def test_a_false_rank_is_refused_and_its_pickle_not_run(pair, tmp_path):
    canary, kinds = tmp_path / "canary", ["pickle", *KINDS]
    cases = [{"kind": kind, "canary": str(canary)} for kind in kinds]
    first, _ = pair.run("tests.training.hostile_ranks:exchange_with_a_false_rank", cases)
    assert not canary.exists()
    for kind, said in zip(kinds, first, strict=True):
        assert said.startswith("rank 1 sent a message that no rank of this run sends"), kind
        assert "\n" not in said
        assert len(said) < 250


@pytest.mark.parametrize("length", [-1, 0, 1 << 62])
def test_no_memory_is_reserved_for_an_impossible_length(pair, length):
    first, _ = pair.run("tests.training.hostile_ranks:announce_a_length", [{"length": length}])
    assert first == [f"rank 1 sent a message that no rank of this run sends ({length} bytes)"]


def test_floats_keep_their_bits(pair):
    first, second = pair.run("tests.training.hostile_ranks:exchange_floats", [{}])
    values = [[0.1 + rank, -0.0, 5e-324, 1e308, float("inf"), float("-inf"), float("nan")] for rank in (0, 1, 0)]
    assert first == second == [[[value.hex() for value in row] for row in values]]


def test_small_values_never_wait_for_a_gpu(pair):
    """They travel from CPU to CPU over the gloo group, two messages each, whatever the ranks' own group is."""
    first, second = pair.run("tests.training.hostile_ranks:groups_of_small_values", [{}])
    assert first == second == [[True] * 6]


BLAME = row_of(flag, text, list_of(text))


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (BLAME, [True, "the loss", ["\udcff.jpg"]], [[1, "the loss", []], [True, "the loss"], [True, "", [], []], {}]),
        (optional(text), None, [0, [], False]),
        (row_of(whole_number, text), [3, "f"], [[True, "f"], [3.0, "f"], "3f", [3, None]]),
    ],
)
def test_a_value_of_another_form_is_refused(parse, good, bad):
    received = as_received(good, parse)
    assert received == (tuple(good) if isinstance(good, list) else good)
    for value in bad:
        with pytest.raises(ForeignMessageError):
            as_received(value, parse)
