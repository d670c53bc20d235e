"""A rank that runs out of memory leaves, and the launcher starts all again from the newest checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import launch, read_metrics
from ranks import run_ranks

from tests.training.out_of_memory_ranks import SETTINGS
from zerovision.training.base.errors import OUT_OF_MEMORY_EXIT_CODE
from zerovision.training.config import TrainConfig
from zerovision.training.observe.device_use import FILL
from zerovision.training.run import run

PLANTED = """
import os
import re
import sys

calls = []

def planted(logits, *given, **named):
    if torch.is_grad_enabled() and os.environ.get("RANK") == "1" and len(logits) > 8:
        calls.append(0)
        if len(calls) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return entropy(logits, *given, **named)

if any(word.endswith("local_ranks.py") for word in sys.orig_argv):  # no launcher takes the seconds of an import
    import torch.nn.functional

    entropy, torch.nn.functional.cross_entropy = torch.nn.functional.cross_entropy, planted
"""


@pytest.mark.parametrize(
    ("on_oom", "code"), [("adapt", 0), pytest.param("stop", OUT_OF_MEMORY_EXIT_CODE, marks=pytest.mark.slow)]
)
def test_a_rank_that_runs_out_of_memory_ends_the_start_and_smaller_settings_go_on(tmp_path, on_oom, code):
    """Python imports `sitecustomize` at its start: the fourth step on more than 8 images fails on rank 1."""
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    words = ["basic_cnn", "ddp", "2", "16", "1", "--data", "fake", "--image-size", "8", "--on-oom", on_oom]
    flags = ["--save-every-steps", "1", "--run-name", "run", "--log-dir", str(tmp_path), "--report", "false"]
    result = launch(*words, *flags, "--tensorboard", "false", PYTHONPATH=str(tmp_path))
    assert result.returncode == code, result.stdout + result.stderr
    assert "error: rank 1 ran out of memory: CUDA out of memory. Tried to allocate 2.00 GiB." in result.stderr
    assert "restart 1 of" not in result.stderr  # rank 0, which lost its connection, may have ended first
    if on_oom == "stop":
        assert "; next to try: --batch-size=8 --gradient-accumulation-steps=2: " in result.stderr
    else:
        assert ": starting again with --batch-size=8 --gradient-accumulation-steps=2: " in result.stderr
        assert read_metrics(tmp_path / "runs/run", "resume")[0]["step"] >= 2
        assert read_metrics(tmp_path / "runs/run", "epoch")


class StartsAgain(Exception):
    """A search for a batch size that a launcher starts again, because a rank has run out of memory."""


def start(cases):
    try:
        return run_ranks("tests.training.out_of_memory_ranks:find_batch_size", 2, Path(cases[0]["log_dir"]), cases)
    except AssertionError as error:
        if "rank 1 ran out of memory: " in str(error) and "--batch-size auto continues below" in str(error):
            raise StartsAgain from error
        raise


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Search for a batch size on two ranks and train, in as many starts as it takes; both ranks come to the same."""
    log_dir = tmp_path_factory.mktemp("searches")

    def search(starts: Sequence[int] = (1,), **case) -> dict:
        cases = [case | {"log_dir": str(log_dir), "resume": "auto"}]
        for number in range(1, max(starts) + 1):  # noqa: B007
            with contextlib.suppress(StartsAgain):
                first, second = start(cases)
                break
        assert number in starts
        assert first == second
        assert first[0]["code"] == 0
        return first[0]

    return search


@pytest.mark.slow
def test_all_ranks_take_what_fits_the_one_with_the_least_memory(searched):
    """And train as if that had been given: trials, also those that ran out of memory, leave no trace."""
    found = searched(starts=(2,), name="least", global_batch=256, most=32, lookahead=1, image_size=8)
    outcomes = {tried["batch_size"]: tried["is_out_of_memory"] for tried in found["found"]["tried"]}
    assert outcomes == {8: False, 64: True, 32: False}
    assert found["found"]["batch_size"] == 32
    given = searched(name="given", batch_size=32, gradient_accumulation_steps=4, lookahead=1, image_size=8)
    assert (given["found"], given["weights"]) == (None, found["weights"])


@pytest.mark.slow
def test_the_batch_size_under_a_real_limit_of_one_rank(searched):
    """The kernel gives rank 1 too little for 64 images, some 660 MB, and enough for 8, some 260 MB.

    Whether 32 fit depends on the memory that this processor's convolutions need besides the tensors. What is found has
    been trained with, in the trial and then in the run.
    """
    case = {"global_batch": 128, "model_type": "efficientnet", "image_size": 32}
    found = searched(starts=(1, 2, 3), name="limited", limit_mb=480, **case)["found"]
    assert 8 <= found["batch_size"] < 64
    fitting = next(tried for tried in found["tried"] if tried["batch_size"] == found["batch_size"])
    assert not fitting["is_out_of_memory"]
    assert fitting["taken_bytes"] <= FILL * fitting["room_bytes"] <= FILL * 480e6


def test_a_run_in_one_process_ends_with_the_same_code(monkeypatch, tmp_path, capsys):
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("torch.Tensor.backward", fail)
    config = TrainConfig(**(SETTINGS | {"engine": "torch", "log_dir": str(tmp_path)}))
    assert run(config) == OUT_OF_MEMORY_EXIT_CODE
    assert capsys.readouterr().err.endswith("error: rank 0 ran out of memory: MemoryError\n")
