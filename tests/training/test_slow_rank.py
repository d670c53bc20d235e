"""One of two real ranks sleeps in each step: the other waits for it in the collectives, and it is the one named.

What counts as work, and where time goes: tests/unit/test_timing.py.
"""

from __future__ import annotations

import re
import socket

import pytest
from ranks import run_ranks

from tests.training.timing_ranks import SLEEP_SECONDS

CASES = [(1, "forward", "torch ddp"), (0, "data", "torch ddp"), (1, "forward", "deepspeed fsdp_stage2")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """{(slow rank, where it sleeps, what reduces the gradients): [report of each rank]}."""
    cases = [{"slow_rank": rank, "sleeps_in": span, "reduces": how} for rank, span, how in CASES]
    function = "tests.training.timing_ranks:epoch_with_a_slow_rank"
    results = run_ranks(function, 2, tmp_path_factory.mktemp("slow"), cases)
    return {case: [rank[number] for rank in results] for number, case in enumerate(CASES)}


@pytest.mark.parametrize(("slow_rank", "span", "reduces"), CASES)
def test_the_rank_that_sleeps_is_named_once(slow_rank, span, reduces, reports):
    first, _ = reports[slow_rank, span, reduces]
    (message,) = first["messages"]
    found = re.fullmatch(
        rf"rank {slow_rank} \(host {re.escape(socket.gethostname())}-{slow_rank}\) is slow: "
        r"([\d.]+) ms of work per step, ([\d.]+) ms in the other ranks \(median\)",
        message,
    )
    assert found, message
    assert float(found[1]) >= 1000 * SLEEP_SECONDS
    assert float(found[1]) > float(found[2])  # whose work may take as long as the sleep on a busy machine
    ((kind, values),) = first["events"]
    assert (kind, values["rank"]) == ("slow_rank", slow_rank)


def test_each_machine_has_its_share_of_busy_cores(reports):
    """The ranks are told 25 and 50 %, and that they have a machine each."""
    first, second = reports[CASES[0]]
    host = socket.gethostname()
    assert len(first["cpus"]) == first["points"] > 0
    assert all(point == {f"{host}-0": 0.25, f"{host}-1": 0.5} for point in first["cpus"])
    assert second["cpus"] == []
