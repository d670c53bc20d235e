"""Averages of the weights on real ranks: timm's EMA under every engine, the same bytes on any number of ranks."""

from __future__ import annotations

import itertools
from itertools import product

import pytest

from tests.kit import ROUNDING, assert_same_but_rounding
from zerovision.training.engines.build import ENGINES
from zerovision.training.engines.ways import STRATEGIES

AVERAGE = "tests.training.average_ranks:average"
CASES = [{"strategy": strategy, "engine": engine} for strategy, engine in product(STRATEGIES, ENGINES)] + [
    {"strategy": "fsdp_stage3", "engine": "torch", "offload": "all"},
    {"strategy": "ddp", "engine": "torch", "over_collectives": True},
]


@pytest.fixture(scope="module")
def reports(run_on_ranks):
    """The reports of each case, of both ranks."""
    return [*zip(*run_on_ranks(AVERAGE, 2, CASES), strict=True)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: "-".join(map(str, CASES[number].values())))
def test_timms_ema_is_evaluated_and_exported_and_training_goes_on_as_without_it(number, reports):
    first, second = reports[number]
    for report in (first, second):
        assert report["is_timms"]
        assert report["is_undisturbed"]
        assert report["difference"] < ROUNDING
    assert_same_but_rounding(first["logits"], second["logits"])


def test_weights_that_every_rank_has_are_not_sent_to_rank_0(reports):
    for case, ranks in zip(CASES, reports, strict=True):
        is_whole = case["strategy"] == "ddp" or (case["strategy"], case["engine"]) == ("fsdp_stage2", "deepspeed")
        parameters = 8  # of the network
        assert [report["sent"] for report in ranks] == [0 if is_whole else parameters] * 2, case


@pytest.mark.parametrize("is_sharded", [False, True])
def test_any_number_of_ranks_averages_to_the_same_bytes(is_sharded, run_on_ranks, reports):
    own = [case["engine"] == "torch" and (case["strategy"] != "ddp") == is_sharded for case in CASES]
    cases = [*itertools.compress(CASES, own)]
    runs = [report for size in (1, 4) for rank in run_on_ranks(AVERAGE, size, cases) for report in rank]
    runs += [report for ranks in itertools.compress(reports, own) for report in ranks]
    assert len({report["digest"] for report in runs}) == 1


def test_lookahead_waits_for_ranks_that_share_weights_alone(run_on_ranks):
    """They wait before and after a pull. Weights that travel are each rank's own: a wait would stop a GPU's host."""
    cases = [{"over_collectives": False}, {"over_collectives": True}]
    assert run_on_ranks("tests.training.average_ranks:waits_of_lookahead", 2, cases) == [[2, 0]] * 2
