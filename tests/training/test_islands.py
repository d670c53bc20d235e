"""Islands on real ranks: the bytes of a simulation in one process, before and after any resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from commands import read_epochs, read_metrics

from tests.training.engine_ranks import make_model
from tests.training.island_ranks import LEAVES, digests, simulate

CASE = ("islands", "precision", "over_collectives")
TRAIN = "tests.training.island_ranks:train"
SENT_BYTES = {"fp32": 1024 * (4 + 4), "bf16": 1024 * (2 + 2)}  # per block, there and back
STATISTICS = 4 * 32  # of BatchNorm: means and variances of 8 and of 16 channels, each aligned


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let this process add up as the ranks do, which have a thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [(2, "fp32", False), (2, "bf16", False)]),
        (
            4,
            [
                (2, "fp32", False),
                (2, "fp32", True),
                (4, "fp32", False),
                (4, "bf16", True),
                (2, "bf16", False),
            ],
        ),
    ],
)
def test_islands_give_the_bytes_of_a_simulation_in_one_process(ranks, cases, run_on_ranks):
    found = run_on_ranks(TRAIN, ranks, [dict(zip(CASE, case, strict=True)) for case in cases])
    for (islands, precision, _), *reports in zip(cases, *found, strict=True):
        expected = simulate(islands, precision)
        assert reports[0]["found"].keys() == expected.keys()
        for name, found_digests in reports[0]["found"].items():
            assert found_digests == expected[name], (islands, precision, name)
        assert all(report["are_equal"] for report in reports)
        assert all(report["rounds"] == [[4, 1, 4], [6, 2, 2]] for report in reports)
        assert all(report["polls"] == [1, 5] for report in reports)  # ranks ask each other once a round
        # Each parameter begins a block: a rank has all 9, or 6 of its island's in three buckets; it adds up a part.
        part = (9 if ranks == islands else 6) / islands
        of_ways = SENT_BYTES[precision] * part * (islands - 1)
        of_statistics = 4 * STATISTICS * LEAVES // ranks * (ranks - 1)
        sent = [of_ways + of_statistics] * 2
        assert all(report["sent_bytes"] == sent for report in reports), (islands, precision)
        assert expected["islands after 0"]["head.bias"] != expected["islands after 0"]["island 1/head.bias"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_that_update_no_weights_take_part_in_outer_steps(precision, run_on_ranks):
    case = {"islands": 2, "precision": precision, "of_one_matrix": True}
    (alone, _), four = ([report for (report,) in run_on_ranks(TRAIN, ranks, [case])] for ranks in (2, 4))
    assert [report["updates"] > 0 for report in four] == [True, False, True, False]
    assert four[0]["found"] == alone["found"]
    assert all(report["are_equal"] for report in four)
    assert [min(report["sent_bytes"]) > 0 for report in four] == [True, False, True, False]


def test_an_island_skips_a_step_alone_and_all_ranks_count_it(run_on_ranks):
    reports = [report for (report,) in run_on_ranks("tests.training.island_ranks:skip_on_one", 2, [{}])]
    for report in reports:
        assert report["counts"] == [1, 0]
        assert report["messages"] == [
            "step 2 skipped on the island of rank 1 (1 in a row): an image is not finite on rank 1, samples photo-0"
            ", photo-0"
        ]
    assert [report["applied"] for report in reports] == [[3] * (LEAVES // 2), [2] * (LEAVES // 2)]
    assert [report["changed"] for report in reports] == [[True, True], [False, True]]


@pytest.mark.parametrize(("before", "after", "applied"), [(2, 4, [0, 1, 2, 3]), (4, 2, [1, 1, 3, 3]), (4, 1, [3] * 4)])
def test_another_number_of_islands_goes_on_with_the_state_that_there_is(before, after, applied, run_on_ranks):
    case = {"before": before, "after": after}
    reports = [report for (report,) in run_on_ranks("tests.training.island_ranks:change_islands", 4, [case])]
    assert [report["applied"] for report in reports] == applied
    old, new = reports[0]["before"], reports[0]["after"]
    names = [name for name in new["weights"] if not name.startswith("island")]
    assert len(new["weights"]) == after * len(names)
    for name in names:
        zero = digests({name: torch.zeros(dict(make_model(True).named_parameters())[name].shape)})[name]
        for kind, island in product(new, range(after)):
            own = f"island {island}/{name}" if island and not kind.startswith(("outer_w", "outer_m")) else name
            first = {"weights": old["outer_weights"][name], "outer_residual": zero}.get(kind, old[kind][name])
            assert new[kind][own] == (old[kind][own] if island < before else first), (kind, own)


@pytest.fixture(scope="module")
def train(train_on_ranks):
    """Train with dropout on so many ranks, each step on 4 leaves of 48 images; return the folder of the run."""

    def train(ranks: int, log_dir: Path, **changes: object) -> Path:
        case = {"epochs": 2, "dropout": 0.2, "batch_size": 48, "keep_last": 99, "local_steps": 5, "islands": 2}
        case |= {"gradient_accumulation_steps": LEAVES // ranks}
        return train_on_ranks(ranks, log_dir, "island_ranks", **case | changes)

    return train


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory) -> Callable[..., Path]:
    """Return the folder of an undisturbed run in an outer precision, with a checkpoint after each step."""

    @cache
    def run(precision: str) -> Path:
        return train(
            2, tmp_path_factory.mktemp(precision), save_every_steps=1, outer_precision=precision, log_every_steps="auto"
        )

    return run


@pytest.mark.parametrize(
    ("precision", "step"),
    [pytest.param("fp32", "00000-0000003", marks=pytest.mark.slow), ("bf16", "00001-0000005")],
)
def test_more_ranks_per_island_go_on_in_mid_round_and_end_with_the_same_bytes(whole, train, tmp_path, precision, step):
    undisturbed = whole(precision)
    checkpoint = undisturbed / f"checkpoints/step-{step}"
    resumed = train(4, tmp_path, resume=str(checkpoint), outer_precision=precision)
    assert (resumed / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    assert read_epochs(resumed).items() <= read_epochs(undisturbed).items()
    assert max(read_epochs(resumed)) == 2
    assert read_metrics(undisturbed, "step")[0]["step"] == 5  # after the first outer step


def test_what_is_left_goes_on_with_fewer_islands_and_with_all_when_they_are_back(whole, train, tmp_path):
    checkpoint = f"{whole('bf16')}/checkpoints/step-00000-0000003"
    less = {"resume": checkpoint, "outer_precision": "bf16", "save_every_steps": 1}
    alone = train(1, tmp_path / "alone", **less)
    again = train(1, tmp_path / "again", **less | {"resume": f"{alone}/checkpoints/step-00001-0000004"})
    assert (again / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    back = train(2, tmp_path / "back", **less | {"resume": f"{alone}/checkpoints/step-00001-0000004"})
    taking_part = [{line["islands"] for line in read_metrics(run, "outer_step")} for run in (alone, again, back)]
    assert taking_part == [{1}, {1}, {2}]


def test_one_local_step_is_ddp_and_more_are_not(train, tmp_path):
    settings = [{"local_steps": 1}, {"local_steps": 1, "islands": 0}, {}]
    one, ddp, five = (train(2, tmp_path / str(number), epochs=1, **more) for number, more in enumerate(settings))
    assert (one / "model.safetensors").read_bytes() == (ddp / "model.safetensors").read_bytes()
    assert read_epochs(one) == read_epochs(ddp) != read_epochs(five)
