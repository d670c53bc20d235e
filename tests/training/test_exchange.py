"""What ranks exchange: small values, gradients of parameters that a leaf does not use, and sums between machines."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from zerovision.training.engines.ways import STRATEGIES
from zerovision.training.world.collectives import broadcast_object, gather_objects
from zerovision.training.world.world import World


def test_floats_keep_their_bits(run_on_ranks):
    first, second = run_on_ranks("tests.training.exchange_ranks:exchange_floats", 2, [{}])
    values = [[0.1 + rank, -0.0, 5e-324, 1e308, float("inf"), float("-inf"), float("nan")] for rank in (0, 1, 0)]
    assert first == second == [[[value.hex() for value in row] for row in values]]


def test_small_values_never_wait_for_a_gpu(run_on_ranks):
    """They travel from CPU to CPU over the gloo group, two messages each, whatever the ranks' own group is."""
    first, second = run_on_ranks("tests.training.exchange_ranks:groups_of_small_values", 2, [{}])
    assert first == second == [[True] * 6]


@pytest.mark.parametrize("exchange", [gather_objects, broadcast_object])
def test_a_value_that_json_does_not_have_is_refused(exchange):
    with pytest.raises(TypeError, match="not JSON serializable"):
        exchange(object(), World(0, 0, 1, 1, None))


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


UNUSED_PARAMETERS_TRAIN = "tests.training.unused_ranks:train"
# Of each micro-step, those of a rank one after another, whether it uses all of the network.
PATTERNS = (
    (True, False, False, True),
    (False, True, True, False),
    (False, False, True, True),
    (True, False, True, True),
    (False, False, False, True, True, True, True, False),
)


def check(cases, reports):
    for case, report in zip(cases, reports, strict=True):
        np.testing.assert_allclose(report["norms"], report["plain_norms"], rtol=1e-5, err_msg=str(case))
        for name, values in report["plain"].items():
            found = np.array(report["weights"][name])
            np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-6, err_msg=f"{case} {name}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_that_some_micro_batches_skip(ranks, run_on_ranks):
    cases = [
        {"skipped": "layer", "strategy": strategy, "used": [*used]} for strategy, used in product(STRATEGIES, PATTERNS)
    ]
    for reports in run_on_ranks(UNUSED_PARAMETERS_TRAIN, ranks, cases):
        check(cases, reports)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_that_all_ranks_skip_in_some_micro_batches(ranks, run_on_ranks):
    patterns = ((True, False, True, False), (False, True, False, True), (False, True, True, True) * 2)
    cases = [
        {"skipped": f"block {block}", "strategy": strategy, "used": [*used]}
        for block, strategy, used in product((0, 2), STRATEGIES, patterns)
    ]
    for reports in run_on_ranks(UNUSED_PARAMETERS_TRAIN, ranks, cases):
        check(cases, reports)


def test_ranks_that_run_other_blocks_than_each_other_change_no_weight(run_on_ranks):
    """FSDP2 would gather, and add, parts of different blocks, without a word."""
    alike, different = [True, False, True, False], [True, True, False, False]
    cases = [
        {"skipped": "one of two blocks", "strategy": strategy, "used": used}
        for strategy, used in product(STRATEGIES, (alike, different))
    ]
    for reports in run_on_ranks(UNUSED_PARAMETERS_TRAIN, 2, cases):
        right = [at for at, case in enumerate(cases) if case["used"] is alike or case["strategy"] == "ddp"]
        check([cases[at] for at in right], [reports[at] for at in right])
        for at in set(range(len(cases))) - {*right}:
            assert np.isnan(reports[at]["norms"]).all()
            assert reports[at]["weights"] == reports[at]["start"]


def test_a_block_waits_for_its_own_weights_alone(run_on_ranks):
    """Under ddp the parts that ranks have updated are gathered while the next forward begins."""
    cases = [{"skipped": "none", "used": [True] * 2}, {"skipped": "block 0", "used": [False] * 4}]
    for reports in run_on_ranks("tests.training.unused_ranks:train_with_late_gathers", 2, cases):
        check(cases, reports)
        assert "wait step wait block 0 wait block 1" in " ".join(reports[0]["order"])
