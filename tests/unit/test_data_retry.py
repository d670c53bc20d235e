"""What a file server refuses for a moment is tried again; what it refuses for longer ends the run, not the image."""

from __future__ import annotations

import errno
import io
import os
import pickle
import time
from pathlib import Path

import pytest
from made_data import class_folders
from PIL import Image

from training.config import TrainConfig
from training.data import DataOptions, load_data
from training.data.reading import images
from training.data.reading.images import ImageError, read_file
from training.errors import FILE_SERVER_EXIT_CODE, FileServerError
from training.run import run

HICCUPS = [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO, errno.EHOSTDOWN, errno.EMFILE]


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """Return the seconds of every sleep, none of which is slept."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


@pytest.fixture
def server(monkeypatch):
    """Return a function after which `times` openings, reads or listings of paths that end in `name` fail."""

    def fails(name: str, at: str, code: int, times: int) -> None:
        left = [times]
        original = {"open": os.open, "read": open, "list": os.scandir}[at]

        def failing(path, *arguments):
            opened = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
            if not opened.endswith(name) or not left[0]:
                return original(path, *arguments)
            left[0] -= 1
            if at != "read":
                raise OSError(code, os.strerror(code), opened)
            return BrokenFile(path, code)

        where = {"open": (os, "open"), "read": (images, "open"), "list": (os, "scandir")}[at]
        monkeypatch.setattr(*where, failing, raising=False)

    return fails


class BrokenFile(io.FileIO):
    """A file of which no byte can be read."""

    def __init__(self, descriptor: int, code: int) -> None:
        super().__init__(descriptor)
        self.code = code

    def read(self, size=-1):
        raise OSError(self.code, os.strerror(self.code))


def folder(root: Path) -> Path:
    for each in class_folders(root):
        for number in range(2):
            Image.new("RGB", (8, 8), (9 * number, 9, 9)).save(each / f"{number}.png")
    return root


@pytest.mark.parametrize("at", ["open", "read"])
@pytest.mark.parametrize("code", HICCUPS)
def test_a_file_is_read_at_the_fourth_try(tmp_path, server, waits, at, code):
    (tmp_path / "image.png").write_bytes(b"content")
    server("/image.png", at, code, times=3)
    assert read_file(tmp_path / "image.png") == b"content"
    assert waits == [1, 2, 4]


def test_what_lasts_is_no_fault_of_the_image(tmp_path, server, waits):
    (tmp_path / "image.png").write_bytes(b"content")
    server("/image.png", "open", errno.ESTALE, times=4)
    with pytest.raises(
        FileServerError, match=r"image\.png' cannot be read: Stale file handle, also after 7 s"
    ) as error:
        read_file(tmp_path / "image.png")
    assert waits == [1, 2, 4]
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOENT, errno.ELOOP])
def test_what_is_wrong_with_the_file_is_said_at_once(tmp_path, server, waits, code):
    server("/image.png", "open", code, times=1)
    with pytest.raises(ImageError, match=os.strerror(code)):
        read_file(tmp_path / "image.png")
    assert waits == []


def test_a_folder_is_listed_again(tmp_path, server, waits):
    root = folder(tmp_path)
    expected = load_data(DataOptions(data=str(root))).fingerprint
    server("/train/a", "list", errno.ESTALE, times=2)
    assert load_data(DataOptions(data=str(root))).fingerprint == expected
    assert waits == [1, 2]


@pytest.mark.parametrize(("at", "name"), [("open", "/train/a/1.png"), ("open", "/val/b/0.png"), ("list", "/train/a")])
def test_a_run_ends_with_a_code_that_is_restarted(tmp_path, server, waits, capfd, at, name):
    server(name, at, errno.ESTALE, times=10**6)
    config = TrainConfig(
        data=str(folder(tmp_path / "data")), model_type="basic_cnn", image_size=32, batch_size=2, epochs=1,
        bad_images="skip:0.5", log_dir=str(tmp_path / "logs"), tensorboard=False, cache="off", workers="0",
    )  # fmt: skip
    assert run(config) == FILE_SERVER_EXIT_CODE
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if "Stale file handle" in line] == lines[-1:]
    assert lines[-1].startswith(f"error: '{tmp_path / 'data'}{name}' cannot be read")
