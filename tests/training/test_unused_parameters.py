"""A parameter that gets no gradient in some micro-batches keeps what the others gave it, under every strategy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from zerovision.training.engines.strategies import STRATEGIES

TRAIN = "tests.training.unused_ranks:train"
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
    for reports in run_on_ranks(TRAIN, ranks, cases):
        check(cases, reports)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_that_all_ranks_skip_in_some_micro_batches(ranks, run_on_ranks):
    patterns = ((True, False, True, False), (False, True, False, True), (False, True, True, True) * 2)
    cases = [
        {"skipped": f"block {block}", "strategy": strategy, "used": [*used]}
        for block, strategy, used in product((0, 2), STRATEGIES, patterns)
    ]
    for reports in run_on_ranks(TRAIN, ranks, cases):
        check(cases, reports)


def test_ranks_that_run_other_blocks_than_each_other_change_no_weight(run_on_ranks):
    """FSDP2 would gather, and add, parts of different blocks, without a word."""
    alike, different = [True, False, True, False], [True, True, False, False]
    cases = [
        {"skipped": "one of two blocks", "strategy": strategy, "used": used}
        for strategy, used in product(STRATEGIES, (alike, different))
    ]
    for reports in run_on_ranks(TRAIN, 2, cases):
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
