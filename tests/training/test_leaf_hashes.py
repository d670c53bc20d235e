"""`bisect_runs` names the rank on which two runs that should be equal have parted, by the hashes of its leaves."""

from __future__ import annotations

from tests.training.flip_ranks import few_elements
from zerovision.extras.bisect_runs import compare, lines_of
from zerovision.extras.replay import differences, replay

RUN = "tests.training.flip_ranks:run"
WRONG = {"outputs": {"rank": 1, "step": 3}, "gradients": {"rank": 0, "step": 4}}


def test_a_bit_that_one_rank_gets_wrong_is_found_on_that_rank(run_on_ranks, tmp_path):
    logs = {"log_dir": str(tmp_path)}
    wrong = [{"name": what, "wrong": what, "leaves": 2} | where | logs for what, where in WRONG.items()]
    codes = run_on_ranks(RUN, 2, [{"name": "two", "leaves": 2} | logs, *wrong])
    codes += run_on_ranks(RUN, 1, [{"name": "one", "leaves": 4} | logs])
    assert {code for rank in codes for code in rank} == {0}
    runs = tmp_path / "runs"
    assert compare(runs / "one", runs / "two").step == 0, "any number of ranks has the same leaves"
    for what, where in WRONG.items():
        leaf = 2 * where["rank"] + 2
        words = {"outputs": "of the same images", "gradients": "of the same images and outputs"}[what]
        for right, ranks in (("two", f"{where['rank']}"), ("one", " | ".join({"0": 0, str(where["rank"]): 0}))):
            found = compare(runs / right, runs / what)
            assert (found.step, found.last_equal, found.images_differ) == (where["step"], where["step"] - 1, False)
            assert found.leaves == [f"rank {ranks} (leaf {leaf}): other {what} {words}"]
            assert f"leaves       1 of 4 differ: {found.leaves[0]}" in list(lines_of(found))
    # Which of the two was wrong is told by training the step again.
    with few_elements():
        watched = replay(runs / "gradients", WRONG["gradients"]["step"])
    first, *others = differences(watched, runs / "gradients") or []
    assert first == "rank 0 (leaf 2): other gradients of the same images and outputs"
    assert others, "the weights"
    assert differences(watched, runs / "two") == []
