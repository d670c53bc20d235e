"""Fixtures that several files of unit tests share."""

from __future__ import annotations

import os
import sys

import pytest

from tests.chaos import disk


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Compute with one thread: sums over two threads differ from those over one in their last digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)
        yield


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Draw the same numbers from PyTorch in a test whatever ran before it in the same process."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 64 KiB; skips where mounting is not permitted."""
    if why := disk.why_no_disk():
        pytest.skip(why)
    with disk.small_disk(tmp_path / "disk", "64k") as path:
        yield path


@pytest.fixture
def group():
    """The process group of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def no_sync(monkeypatch):
    """Leave out waiting for the disk: it costs more than all else in tests of what the files hold."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def trained():
    """basic_cnn trained on the digits, in evaluation mode, and the digits; tests change copies of it alone."""
    from exports import train_on_digits

    built, data = train_on_digits()
    built.module.eval()
    return built, data


@pytest.fixture
def few_images(monkeypatch):
    """Let the data set fake have 128 training and 20 validation images."""
    monkeypatch.setattr("zerovision.training.data.arrays.FAKE_TRAIN_IMAGES", 128)
    monkeypatch.setattr("zerovision.training.data.arrays.FAKE_VAL_IMAGES", 20)
