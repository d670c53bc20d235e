"""Islands on real ranks: the bytes of a simulation in one process, before and after any resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil
from pathlib import Path

import pytest
from commands import read_metrics

from tests.training.island_ranks import LEAVES, simulate

CASE = ("islands", "precision", "over_collectives")
TRAIN = "tests.training.island_ranks:train"
SENT_BYTES = {"fp32": 1024 * (4 + 4), "bf16": 1024 * (2 + 2), "int8": 1024 * (1 + 2) + 4}  # per block, there and back
STATISTICS = 4 * 32  # of BatchNorm: means and variances of 8 and of 16 channels, each aligned
RUN = "tests.training.out_of_memory_ranks:run"


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [(2, "fp32", False), (2, "int8", False)]),
        (4, [(2, "fp32", False), (2, "fp32", True), (4, "fp32", False), (4, "bf16", False), (2, "int8", True)]),
    ],
)
def test_islands_give_the_bytes_of_a_simulation_in_one_process(ranks, cases, run_on_ranks):
    found = run_on_ranks(TRAIN, ranks, [dict(zip(CASE, case, strict=True)) for case in cases])
    for (islands, precision, _), *reports in zip(cases, *found, strict=True):
        expected = simulate(islands, precision)
        assert reports[0]["found"].keys() == expected.keys()
        for name, digests in reports[0]["found"].items():
            assert digests == expected[name], (islands, precision, name)
        assert all(report["are_equal"] for report in reports)
        assert all(report["rounds"] == [[4, 1, 4], [6, 2, 2]] for report in reports)
        # Of 3 blocks of matrices and 1 of vectors a rank has all, or 2 + 1 of its island's, and it adds up a part.
        part = (3 + 1 if ranks == islands else 2 + 1) / islands
        of_ways = SENT_BYTES[precision] * (part if precision == "fp32" else ceil(part)) * (islands - 1)
        of_statistics = 4 * STATISTICS * LEAVES // ranks * (ranks - 1)
        assert {report["sent_bytes"] for report in reports} == {of_ways + of_statistics}, (islands, precision)
        assert expected["islands after 0"]["head.bias"] != expected["islands after 0"]["island 1/head.bias"]


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


@pytest.fixture(scope="module")
def train(run_on_ranks):
    """Train with dropout on so many ranks, each step on 4 leaves of 48 images; return the folder of the run."""

    def train_on_ranks(ranks: int, log_dir: Path, **changes: object) -> Path:
        case = {"log_dir": str(log_dir), "name": "run", "epochs": 2, "dropout": 0.2, "batch_size": 48}
        case |= {"gradient_accumulation_steps": LEAVES // ranks, "keep_last": 99, "local_steps": 5, "islands": 2}
        assert all(result["code"] == 0 for (result,) in run_on_ranks(RUN, ranks, [case | changes]))
        return log_dir / "runs" / "run"

    return train_on_ranks


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory) -> Callable[[str], Path]:
    """Return the folder of an undisturbed run in an outer precision, with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp
    return cache(lambda precision: train(2, folder(precision), save_every_steps=1, outer_precision=precision))


def epochs(folder: Path) -> dict[int, tuple[float, ...]]:
    names = ("train_loss", "train_top1", "val_loss", "val_top1")
    return {entry["epoch"]: tuple(entry[name] for name in names) for entry in read_metrics(folder, "epoch")}


@pytest.mark.parametrize(("precision", "step"), [("fp32", "00000-0000003"), ("int8", "00001-0000005")])
def test_more_ranks_per_island_go_on_in_mid_round_and_end_with_the_same_bytes(whole, train, tmp_path, precision, step):
    undisturbed = whole(precision)
    resumed = train(4, tmp_path, resume=str(undisturbed / f"checkpoints/step-{step}"), outer_precision=precision)
    assert (resumed / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    assert epochs(resumed).items() <= epochs(undisturbed).items()
    assert max(epochs(resumed)) == 2


def test_one_local_step_is_ddp_and_more_are_not(whole, train, tmp_path):
    settings = [{"local_steps": 1}, {"local_steps": 1, "islands": 0}]
    one, ddp = (train(2, tmp_path / str(number), **more) for number, more in enumerate(settings))
    assert (one / "model.safetensors").read_bytes() == (ddp / "model.safetensors").read_bytes()
    assert epochs(one) == epochs(ddp) != epochs(whole("fp32"))
