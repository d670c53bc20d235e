"""What users get wrong, through the real entries: one line, exit code 2, no traceback, and never a hang."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

import pytest
from commands import ENTRY, assert_success, assert_user_error, launch, run_command, train_alone, train_here
from PIL import Image
from ranks import run_ranks

from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.sampler import BatchPlan


def make_folder(root, classes=("cat", "dog"), count=12):
    for name in classes:
        (root / name).mkdir(parents=True)
        for number in range(count):
            color = (20 * number % 256, 90 if name == "cat" else 160, 40)
            Image.new("RGB", (40, 40), color).save(root / name / f"{number}.jpg")
    return root


def truncate(path):
    path.write_bytes(path.read_bytes()[:200])


def test_missing_data_folder_over_two_ranks(tmp_path):
    result = launch("basic_cnn", "ddp", "2", "8", "1", "--data", "/no/such/folder", "--log-dir", str(tmp_path))
    assert_user_error(result, "/no/such/folder")


@pytest.fixture
def taken_port():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield str(taken.getsockname()[1])


@pytest.mark.slow  # of the store: tests/unit/test_rank_variables.py
def test_occupied_port(taken_port):
    """Rank 0 of two, started as a launcher does: `deepspeed` ends rank 1, which waits for it, after 30 s only."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    result = train_alone("--data", "fake", MASTER_ADDR="127.0.0.1", MASTER_PORT=taken_port, **ranks)
    assert_user_error(result, f"port {taken_port} is in use")


@pytest.mark.slow
def test_occupied_port_under_deepspeed(taken_port):
    result = run_command("deepspeed", "--num_gpus=2", "--master_port", taken_port, ENTRY, "--data", "fake")
    assert result.returncode == 2
    assert f"error: port {taken_port} is in use" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr


# Takes the port of the first start's store, after the launcher has found it free.
TAKES_THE_PORT = """
import os, socket
if (os.environ.get("RANK"), os.environ.get("ZEROVISION_RESTARTS")) == ("0", "0"):
    taken = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
"""


def test_a_port_that_another_program_takes_in_the_last_moment_costs_a_restart(tmp_path):
    (tmp_path / "takes.py").write_text(TAKES_THE_PORT)
    words = ["basic_cnn", "ddp", "2", "8", "1", "--data", "fake", "--image-size", "16", "--log-dir", str(tmp_path)]
    result = assert_success(launch(*words, "--report", "false", "--plugin", str(tmp_path / "takes.py")))
    assert "is in use, and was free when the launcher checked it" in result.stderr
    assert "restart 1 of 3" in result.stderr
    assert "restart 2" not in result.stderr


def test_unreadable_image_in_the_middle_of_an_epoch_ends_all_ranks(tmp_path):
    """The rank that reads it must not leave the other waiting in a collective, nor save a step without it."""
    root = make_folder(tmp_path / "images", count=40)
    pair = load_data(DataOptions(str(root), image_size=32))
    keys = BatchPlan(len(pair.train), 2, 1, 2, seed=0).epoch_keys(0, 1, 0)  # of rank 1
    path = pair.train.source.name(int(next(itertools.islice(keys, 3, None)).indices[0]))
    truncate(Path(path))
    flags = ["--data", str(root), "--image-size", "32", "--log-dir", str(tmp_path / "logs"), "--save-every-steps", "1"]
    result = launch("basic_cnn", "ddp", "2", "2", "1", *flags)
    assert_user_error(result, path)
    (last,) = (tmp_path / "logs" / "runs").glob("*/checkpoints/last")
    assert last.read_text().strip() == "step-00000-0000003"


@pytest.fixture
def one_bad_image_of_each_of_two_ranks(tmp_path):
    """(folder, the paths, how many images there are)."""
    root = make_folder(tmp_path / "images", count=40)
    pair = load_data(DataOptions(str(root), image_size=32))
    plan = BatchPlan(len(pair.train), 2, 1, 2, seed=0)
    firsts = [int(next(iter(plan.epoch_keys(0, rank, 0))).indices[0]) for rank in range(2)]
    paths = [pair.train.source.name(index) for index in firsts]
    for path in paths:
        truncate(Path(path))
    return root, paths, len(pair.train)


def test_the_share_of_skipped_images_holds_for_all_ranks_together(one_bad_image_of_each_of_two_ranks, tmp_path):
    """One in all is allowed: no rank alone has too many."""
    root, _, images = one_bad_image_of_each_of_two_ranks
    case = {"data": str(root), "image_size": 32, "strategy": "fsdp_stage3", "batch_size": 2, "bad_images": "skip"}
    case |= {"log_dir": str(tmp_path / "logs"), "name": "run"}
    with pytest.raises(AssertionError, match=rf"more than 1 of {images} images.*--bad-images skip:0\.05"):
        run_ranks("tests.training.out_of_memory_ranks:run", 2, tmp_path, [case])


@pytest.mark.slow
def test_images_that_may_be_skipped_are_named(one_bad_image_of_each_of_two_ranks, tmp_path):
    root, paths, _ = one_bad_image_of_each_of_two_ranks
    flags = ["--data", str(root), "--image-size", "32", "--log-dir", str(tmp_path / "logs")]
    allowed = assert_success(launch("basic_cnn", "fsdp_stage3", "2", "2", "1", *flags, "--bad-images", "skip:0.05"))
    assert "2 unreadable images skipped" in allowed.stdout
    assert all(path in allowed.stdout for path in paths)


def test_weights_without_a_network(tmp_path):
    result = train_here("--data", "fake", "--model-type", "mobilenet_finetuned", "--log-dir", str(tmp_path))
    assert_user_error(result, "--weights")
