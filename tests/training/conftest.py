from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks

LONGEST = ("test_matrix", "test_run", "test_stopping")  # few tests, and a minute or two each


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that at the end no worker waits for another that has one of them."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


@pytest.fixture(scope="session")
def run_on_ranks(tmp_path_factory):
    """Call a function with every case on so many ranks, and return result [rank][case]; the ranks stay for the next."""
    started = {}

    def run(function: str, world_size: int, cases: list[dict]) -> list[list]:
        if world_size not in started:
            started[world_size] = Ranks(world_size, tmp_path_factory.mktemp(f"ranks-{world_size}"))
        try:
            return started[world_size].run(function, cases)
        except AssertionError:
            started.pop(world_size).close()
            raise

    yield run
    for ranks in started.values():
        ranks.close()


@pytest.fixture(scope="session")
def train_on_ranks(run_on_ranks):
    """Train with these settings on so many ranks, and return the folder of the run."""

    def train(ranks: int, logs: Path, room: str = "out_of_memory_ranks", **settings: object) -> Path:
        cases = [settings | {"log_dir": str(logs), "name": "run"}]
        assert all(result["code"] == 0 for (result,) in run_on_ranks(f"tests.training.{room}:run", ranks, cases))
        return logs / "runs" / "run"

    return train
