"""Division of the ranks into data x pipeline x tensor."""

from __future__ import annotations

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]  # tensor, pipeline


def test_the_groups_of_a_mesh_are_rows_of_the_ranks(run_on_ranks):
    cases = [{"tensor": tensor, "pipeline": pipeline} for tensor, pipeline in MESHES]
    found = run_on_ranks("tests.training.mesh_ranks:neighbours", 4, cases)
    for number, (tensor, pipeline) in enumerate(MESHES):
        for rank, reports in enumerate(found):
            stride = {"tensor": 1, "pipeline": tensor, "data": tensor * pipeline}
            sizes = {"tensor": tensor, "pipeline": pipeline, "data": 4 // tensor // pipeline}
            for name, size in sizes.items():
                place = rank // stride[name] % size
                ranks = [rank + stride[name] * (other - place) for other in range(size)]
                assert reports[number][name] == {
                    "place": [place, size],
                    "local": [place, size],
                    "rows": ranks,
                    "objects": ranks,
                    "sum and largest": [sum(ranks), max(ranks)],
                    "of main": [min(ranks)] * 2,
                }
    assert found[0][1]["text"].endswith("data 2 x tensor 2")
    assert found[0][3]["text"].endswith("data 1 x pipeline 2 x tensor 2")


def test_tensors_are_copied_a_bounded_part_at_a_time(run_on_ranks):
    limits, largest, total = [1, 100, 10**6], 4 * 2 * 3 * 4 * 4, 4 * (5 + 1 + 2 * 3 * 4 * 4 + 3 * 7 + 1)
    cases = [{"most_bytes": limit, "source": source} for limit, source in zip(limits, (0, 2, 1), strict=True)]
    reports = run_on_ranks("tests.training.mesh_ranks:copied", 4, cases)
    for rank in reports:
        for number, (case, report) in enumerate(zip(cases, rank, strict=True)):
            assert report["after"] == reports[case["source"]][number]["before"]
            assert sum(report["sent"]) == total
            assert max(report["sent"]) < case["most_bytes"] + largest
    assert [len(report["sent"]) for report in reports[0]] == [5, 2, 1]


def test_what_is_not_finite_is_named_by_the_first_rank_that_reads_it(run_on_ranks):
    """By its number among all ranks, not among the groups of them."""
    cases = [{"tensor": tensor, "pipeline": pipeline} for tensor, pipeline in MESHES]
    found = run_on_ranks("tests.training.mesh_ranks:skip", 4, cases)[0]  # which writes the log
    for (tensor, pipeline), (message,) in zip(MESHES, found, strict=True):
        group = tensor * pipeline
        assert message.endswith(f"the loss is not finite on rank {4 - group}, samples {4 // group - 1}.png")
