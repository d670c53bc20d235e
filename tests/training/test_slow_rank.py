"""One of two real ranks sleeps in each step: the other waits for it in the collectives, and it is the one named."""

from __future__ import annotations

import re
import socket

import pytest
from ranks import run_ranks

from tests.training.timing_ranks import SLEEP_SECONDS

OURS = [
    (1, "forward", "torch ddp"),
    (0, "data", "torch ddp"),
    (1, "forward", "deepspeed fsdp_stage2"),
]
DDP = [(1, "forward", "ddp"), (0, "logging", "ddp")]
CASES = OURS + DDP


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """{(slow rank, where it sleeps, what reduces the gradients): [report of each rank]}."""
    cases = [{"slow_rank": rank, "sleeps_in": span, "reduces": how} for rank, span, how in CASES]
    function = "tests.training.timing_ranks:epoch_with_a_slow_rank"
    results = run_ranks(function, 2, tmp_path_factory.mktemp("slow"), cases)
    return {case: [rank[number] for rank in results] for number, case in enumerate(CASES)}


@pytest.mark.parametrize(("slow_rank", "span", "reduces"), CASES[:-1])
def test_the_rank_that_sleeps_is_named_once(slow_rank, span, reduces, reports):
    first, _ = reports[slow_rank, span, reduces]
    (message,) = first["messages"]
    found = re.fullmatch(
        rf"rank {slow_rank} \(host {re.escape(socket.gethostname())}-{slow_rank}\) is slow: "
        r"([\d.]+) ms of work a step, the others ([\d.]+) ms \(median\)",
        message,
    )
    assert found, message
    assert float(found[1]) >= 1000 * SLEEP_SECONDS
    assert float(found[1]) > float(found[2])  # whose work may take as long as the sleep on a busy machine
    ((kind, values),) = first["events"]
    assert (kind, values["rank"]) == ("slow_rank", slow_rank)


def test_whoever_waits_where_no_clock_looks_is_not_called_slow(reports):
    """Rank 0 is late with its logs, which is no work of all ranks; rank 1 waits for it inside DDP's backward."""
    first, second = reports[CASES[-1]]
    assert second["shares"]["backward"] > 0.25, "the wait is there"
    assert first["messages"] == []


def test_each_machine_has_its_share_of_busy_cores(reports):
    """The ranks are told 25 and 50 %, and that they have a machine each."""
    first, second = reports[CASES[0]]
    host = socket.gethostname()
    assert len(first["cpus"]) == len(first["points"]) > 0
    assert all(point == {f"{host}-0": 0.25, f"{host}-1": 0.5} for point in first["cpus"])
    assert second["cpus"] == []


@pytest.mark.parametrize(("slow_rank", "span", "reduces"), OURS)
def test_the_time_is_in_the_right_spans(slow_rank, span, reduces, reports):
    ranks = reports[slow_rank, span, reduces]
    slow, waiting = (ranks[rank]["shares"] for rank in (slow_rank, 1 - slow_rank))
    assert slow[span] == max(slow.values())
    assert waiting["communication"] == max(waiting.values())
    for told in (slow, waiting, *ranks[0]["points"]):
        assert sum(told.values()) == pytest.approx(1.0)
    mean = ranks[0]["points"][1]
    # Next to nothing without the sleep; how much with it depends on what else this machine does.
    assert mean["communication"] > 0.1
    assert mean[span] > 0.1
