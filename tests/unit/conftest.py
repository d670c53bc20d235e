"""Fixtures that several files of unit tests share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Compute with one thread: sums over two threads differ from those over one in their last digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)
        yield


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 64 KiB; skips where mounting is not permitted."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "zerovision-test", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"no tmpfs can be mounted: {result.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


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
