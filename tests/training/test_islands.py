"""Islands on real ranks: the bytes of a simulation in one process, before and after any resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import read_metrics

from tests.training.island_ranks import LEAVES, simulate

TRAIN = "tests.training.island_ranks:train"
RUN = "tests.training.out_of_memory_ranks:run"


@pytest.mark.parametrize(
    ("ranks", "islands", "over_collectives"), [(2, 2, False), (4, 2, False), (4, 2, True), (4, 4, False)]
)
def test_islands_give_the_bytes_of_a_simulation_in_one_process(ranks, islands, over_collectives, run_on_ranks):
    case = {"islands": islands, "over_collectives": over_collectives}
    reports = [report for (report,) in run_on_ranks(TRAIN, ranks, [case])]
    expected = simulate(islands)
    for name, digests in reports[0]["found"].items():
        assert digests == expected[name], name
    assert all(report["are_equal"] for report in reports)
    assert all(report["rounds"] == [[4, 1, 4], [6, 2, 2]] for report in reports)
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
def whole(train, tmp_path_factory) -> Path:
    """The folder of an undisturbed run with a checkpoint after each step."""
    return train(2, tmp_path_factory.mktemp("whole"), save_every_steps=1)


def epochs(folder: Path) -> dict[int, tuple[float, ...]]:
    names = ("train_loss", "train_top1", "val_loss", "val_top1")
    return {entry["epoch"]: tuple(entry[name] for name in names) for entry in read_metrics(folder, "epoch")}


@pytest.mark.parametrize("checkpoint", ["step-00000-0000003", "step-00001-0000005"])
def test_more_ranks_per_island_go_on_in_mid_round_and_end_with_the_same_bytes(whole, train, tmp_path, checkpoint):
    resumed = train(4, tmp_path, resume=str(whole / "checkpoints" / checkpoint))
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert epochs(resumed).items() <= epochs(whole).items()
    assert max(epochs(resumed)) == 2


def test_one_local_step_is_ddp_and_more_are_not(whole, train, tmp_path):
    settings = [{"local_steps": 1}, {"local_steps": 1, "islands": 0}]
    one, ddp = (train(2, tmp_path / str(number), **more) for number, more in enumerate(settings))
    assert (one / "model.safetensors").read_bytes() == (ddp / "model.safetensors").read_bytes()
    assert epochs(one) == epochs(ddp) != epochs(whole)
