from __future__ import annotations

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
