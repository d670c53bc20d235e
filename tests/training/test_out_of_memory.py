"""A rank that runs out of memory: all ranks save the state before that step, and the training goes on exactly."""

from __future__ import annotations

import pytest
from ranks import run_ranks

from tests.training.out_of_memory_ranks import SETTINGS
from training.config import TrainConfig
from training.errors import OUT_OF_MEMORY_EXIT_CODE
from training.observe.memory_limit import FILL
from training.run import run

STEPS = 4  # 1,000 images, 2 ranks x 125 at a time


@pytest.fixture(scope="module")
def train(run_on_ranks, tmp_path_factory):
    """Train on two ranks, and return what the first one brings back; both must have come to the same."""
    log_dir = str(tmp_path_factory.mktemp("logs"))

    def train_on_ranks(**case) -> dict:
        case = {"log_dir": log_dir, "batch_size": 125} | case
        first, second = run_on_ranks("tests.training.out_of_memory_ranks:run_short_of_memory", 2, [case])
        assert first == second
        return first[0]

    return train_on_ranks


@pytest.fixture(scope="module")
def uninterrupted(train):
    """The weights of trainings that never were short of memory, by their settings."""
    known = {}

    def weights_of(**settings) -> str:
        key = repr(settings)
        if key not in known:
            known[key] = train(name=f"whole-{len(known)}", **settings)["weights"]
        return known[key]

    return weights_of


DEEPSPEED = {"engine": "deepspeed", "strategy": "fsdp_stage2"}


@pytest.mark.parametrize(
    ("phase", "at", "settings", "step"),
    [
        ("forward", 2, {}, 2),
        ("backward", 1, {"shared": False, "ema": 0.9, "lookahead": 1}, 1),  # some buckets' sums are on their way
        ("backward", 3, {}, 3),  # in the last step of the epoch
        ("evaluation", 0, {}, STEPS),
        ("forward", 3, {"batch_size": 25, "gradient_accumulation_steps": 5, "shared": False}, 0),
        ("forward", 1, {"engine": "torch"}, 1),
        ("forward", 1, DEEPSPEED, 1),
    ],
)
def test_all_ranks_save_the_state_before_and_it_goes_on_bit_for_bit(
    phase, at, settings, step, train, uninterrupted, request
):
    name = request.node.callspec.id
    stopped = train(name=name, phase=phase, at=at, save_every_steps=1, **settings)
    # A save that was due after the step that is taken back was left out.
    assert stopped == {"code": OUT_OF_MEMORY_EXIT_CODE, "last": f"step-00000-{step:07d}", "furthest": step}
    again = train(name=name, resume="must", activation_checkpointing=not settings, **settings)
    assert again["code"] == 0
    assert again["weights"] == uninterrupted(**settings)


def test_a_real_limit_of_one_rank(tmp_path):
    """A save with nothing left, then a first layer whose output is more than the kernel gives; the next rung fits.

    On ranks of its own: what earlier trainings have freed, an allocator may keep and use again.
    """
    nothing_left = {"name": "save", "phase": "save", "batch_size": 125}
    limit = {"name": "limit", "image_size": 32}
    first_layer = 500 * 32 * 32 * 32 * 4  # bytes: images, channels, pixels
    stopped = limit | {"phase": "limit", "at": first_layer // 10**6 - 10, "batch_size": 500}
    again = limit | {"resume": "must", "batch_size": 100, "gradient_accumulation_steps": 5}
    cases = [{"log_dir": str(tmp_path)} | case for case in (nothing_left, stopped, again)]
    first, second = run_ranks("tests.training.out_of_memory_ranks:run_short_of_memory", 2, tmp_path, cases)
    assert first == second
    assert [(outcome["code"], outcome["last"]) for outcome in first] == [
        (0, "step-00001-0000000"),
        (OUT_OF_MEMORY_EXIT_CODE, "step-00000-0000000"),
        (0, "step-00001-0000000"),
    ]


@pytest.fixture(scope="module")
def searched(run_on_ranks, tmp_path_factory):
    """Search for a batch size on two ranks and train; both must have come to the same."""
    log_dir = tmp_path_factory.mktemp("searches")

    def search(*, on_new_ranks: bool = False, **case) -> dict:
        function, cases = "tests.training.out_of_memory_ranks:find_batch_size", [case | {"log_dir": str(log_dir)}]
        first, second = run_ranks(function, 2, log_dir, cases) if on_new_ranks else run_on_ranks(function, 2, cases)
        assert first == second
        assert first[0]["code"] == 0
        return first[0]

    return search


def test_all_ranks_take_what_fits_the_one_with_the_least_memory(searched):
    """And train as if that had been given: trials, also those that ran out of memory, leave no trace."""
    found = searched(name="least", global_batch=256, most=16, lookahead=1)
    outcomes = {tried["batch_size"]: tried["is_out_of_memory"] for tried in found["found"]["tried"]}
    assert outcomes == {8: False, 64: True, 32: True, 16: False}
    assert found["found"]["batch_size"] == 16
    given = searched(name="given", batch_size=16, gradient_accumulation_steps=8, lookahead=1)
    assert (given["found"], given["weights"]) == (None, found["weights"])


@pytest.mark.slow
def test_the_batch_size_under_a_real_limit_of_one_rank(searched):
    """The kernel gives rank 1 too little for 64 images, some 660 MB, and enough for 8, some 260 MB.

    What is found has been trained with, in the trial and then in the run.
    """
    case = {"global_batch": 128, "model_type": "efficientnet", "image_size": 32, "on_new_ranks": True}
    found = searched(name="limited", limit_mb=480, **case)["found"]
    assert 8 <= found["batch_size"] < 64
    fitting = next(tried for tried in found["tried"] if tried["batch_size"] == found["batch_size"])
    assert fitting["taken_bytes"] <= FILL * fitting["room_bytes"] <= FILL * 480e6


def test_what_cannot_be_taken_back_ends_the_rank_with_the_same_code(monkeypatch, tmp_path, capsys):
    """DDP allows no second backward: the launcher ends the others, and all go on from the newest checkpoint."""

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("torch.Tensor.backward", fail)
    config = TrainConfig(**(SETTINGS | {"engine": "torch", "log_dir": str(tmp_path)}))
    assert run(config) == OUT_OF_MEMORY_EXIT_CODE
    assert capsys.readouterr().err.endswith("error: rank 0 ran out of memory: MemoryError\n")
