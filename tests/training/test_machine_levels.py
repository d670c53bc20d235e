"""Gradients of ranks on several machines are added in two levels: the same bytes, of which fewer leave a machine."""

from __future__ import annotations

from itertools import product

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
