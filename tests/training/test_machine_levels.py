"""Gradients of ranks on several machines are added in two levels: the same bytes, of which fewer leave a machine."""

from __future__ import annotations

from itertools import product

import pytest

from zerovision.training.engines.strategies import STRATEGIES

TRAIN = "tests.training.machine_ranks:train"
CASES = [*product(STRATEGIES, (4, 16, 12))]


def test_two_levels_change_no_bit_and_send_what_leaves_a_machine_once(run_on_ranks):
    cases = [
        {"per_machine": 2, "is_two_level": levels, "leaves": leaves, "strategy": strategy}
        for (strategy, leaves), levels in product(CASES, (True, False))
    ]
    reports = run_on_ranks(TRAIN, 4, cases)
    for at, (strategy, leaves) in enumerate(CASES):
        two, one = 2 * at, 2 * at + 1
        found = [rank[two] for rank in reports], [rank[one] for rank in reports]
        assert len({report["digest"] for report in (*found[0], *found[1])}) == 1, (strategy, leaves)
        left = [sum(report["to_machines"] for report in of_case) for of_case in found]
        print(strategy, leaves, left, [sum(report["to_ranks"] for report in of_case) for of_case in found])
        fits = strategy != "ddp" or leaves != 12  # 2 ranks x 3 leaves are no power of two
        assert left[1] > 0
        assert left[0] == (left[1] // 2 if fits else left[1]), (strategy, leaves)


def test_replicas_send_a_part_of_the_gradients_twice_however_many_they_are(run_on_ranks):
    """Three machines of two ranks, each with a whole copy: their sums are added in pieces, and handed out again."""
    fixed = {"leaves": 12, "strategy": "fsdp_stage3", "is_two_level": False}
    [[alone]] = run_on_ranks(TRAIN, 1, [fixed | {"per_machine": 1}])
    reports = run_on_ranks(TRAIN, 6, [fixed | {"per_machine": 2, "replicate_across": "nodes"}])
    assert {report["digest"] for [report] in reports} == {alone["digest"]}
    machine = [report for [report] in reports[:2]]
    sent, weights = (sum(report[what] for report in machine) for what in ("to_machines", "updated"))
    assert sent / 3 / 4 / weights == pytest.approx(4 / 3, rel=0.02)  # bytes in each of three steps; 2 / 3 each time
