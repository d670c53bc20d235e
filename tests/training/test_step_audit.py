"""`--audit` and `--log-hashes`: flipped bits of gradients are found, named and undone; the hashes of every leaf."""

from __future__ import annotations

import socket

import pytest

from tests.training.flip_ranks import few_elements
from zerovision.extras.bisect_runs import compare, lines_of
from zerovision.extras.replay import differences, replay
from zerovision.training.base.errors import WRONG_GRADIENT_EXIT_CODE

RANKS = "tests.training.step_audit_ranks"


@pytest.mark.parametrize(
    ("flips", "accumulation", "over_collectives"), [(100, 1, False), (25, 1, True), (25, 2, False)]
)
def test_each_flipped_bit_is_found_and_leaves_no_trace(flips, accumulation, over_collectives, run_on_ranks):
    case = {"steps": flips, "accumulation": accumulation, "over_collectives": over_collectives}
    cases = [case | {"wrong": wrong} for wrong in ("owner", "checker")] + [case | {"wrong": "", "audit": False}]
    for *disturbed, plain in run_on_ranks(f"{RANKS}:audited_steps", 2, cases):
        for run in disturbed:
            found = run["events"]["wrong_gradient"]
            assert [one["ranks"] for one in found] == [[culprit] for culprit in run["culprits"]]
            assert [one["step"] for one in found] == [*range(1, flips + 1)]
            assert {*map(len, (one["parameters"] for one in found))} == {1}
            assert run["weights"] == plain["weights"]
            assert f"step 1: rank {run['culprits'][0]} on {socket.gethostname()} computed wrong" in run["messages"][0]


def test_without_a_flip_nothing_is_found_and_ranks_check_each_other_in_turn(run_on_ranks):
    cases = [{"steps": 13, "every": 2, "wrong": "", "audit": audit} for audit in (True, False)]
    for audited, plain in run_on_ranks(f"{RANKS}:audited_steps", 3, cases):
        assert audited["weights"] == plain["weights"]
        assert audited["events"].keys() == {"audit"}
        assert [line["step"] for line in audited["events"]["audit"]] == [2, 4, 6, 8, 10, 12]
        pairs = {(line["rank"], line["again_on"]) for line in audited["events"]["audit"]}
        assert pairs == {(0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)}


def test_a_rank_that_is_always_wrong_ends_the_run_and_two_ranks_cannot_tell_which(run_on_ranks):
    case = {"steps": 9, "wrong": "1", "times": 10**9, "most": 3}
    host = socket.gethostname()
    for size, who in ((3, f"rank 1 on {host}"), (2, f"rank 0 on {host} or rank 1 on {host}")):
        for (result,) in run_on_ranks(f"{RANKS}:audited_steps", size, [case]):
            start = f"{WRONG_GRADIENT_EXIT_CODE}: {who} computed wrong results 3 times since the start (--audit): "
            assert result["ended"].startswith(start)
            assert len(result["events"]["wrong_gradient"]) == 3


def test_a_rank_without_its_images_is_not_compared(run_on_ranks):
    for (result,) in run_on_ranks(f"{RANKS}:unlike_batches", 2, [{}]):
        assert result == {"events": [], "applied": True}


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
            assert (found.step, found.last_equal, found.found.images_differ) == (
                where["step"],
                where["step"] - 1,
                False,
            )
            assert found.found.leaves == [f"rank {ranks} (micro-batch {leaf}): different {what} {words}"]
            assert f"batches      1 of 4 differ: {found.found.leaves[0]}" in list(lines_of(found))
    # Which of the two was wrong is told by training the step again.
    with few_elements():
        watched = replay(runs / "gradients", WRONG["gradients"]["step"])
    first, *others = differences(watched, runs / "gradients") or []
    assert first == "rank 0 (micro-batch 2): different gradients of the same images and outputs"
    assert others, "the weights"
    assert differences(watched, runs / "two") == []
