"""One of two real ranks sleeps in each step: the other waits for it in the collectives, and it is the one named."""

from __future__ import annotations

import re
import socket

import pytest
from ranks import run_ranks

CASES = [(1, "forward"), (0, "data")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """{(slow rank, where it sleeps): [report of each rank]}."""
    cases = [{"slow_rank": rank, "sleeps_in": span} for rank, span in CASES]
    function = "tests.training.timing_ranks:epoch_with_a_slow_rank"
    results = run_ranks(function, 2, tmp_path_factory.mktemp("slow"), cases)
    return {case: [rank[number] for rank in results] for number, case in enumerate(CASES)}


@pytest.mark.parametrize(("slow_rank", "span"), CASES)
def test_the_rank_that_sleeps_is_named_once(slow_rank, span, reports):
    first, _ = reports[slow_rank, span]
    (message,) = first["messages"]
    found = re.fullmatch(
        rf"rank {slow_rank} \(host {re.escape(socket.gethostname())}\) is slow: "
        r"([\d.]+) ms of work a step, the others ([\d.]+) ms \(median\)",
        message,
    )
    assert found, message
    assert float(found[1]) >= 30 > float(found[2])
    ((kind, values),) = first["events"]
    assert (kind, values["rank"]) == ("slow_rank", slow_rank)


@pytest.mark.parametrize(("slow_rank", "span"), CASES)
def test_the_time_is_in_the_right_spans(slow_rank, span, reports):
    slow, waiting = (reports[slow_rank, span][rank]["shares"] for rank in (slow_rank, 1 - slow_rank))
    assert slow[span] == max(slow.values())
    assert waiting["communication"] == max(waiting.values())
    for told in (slow, waiting, *reports[slow_rank, span][0]["points"]):
        assert sum(told.values()) == pytest.approx(1.0)
    mean = reports[slow_rank, span][0]["points"][1]
    assert mean["communication"] > 0.25
    assert mean[span] > 0.25
