"""What a file server refuses for a moment is tried again; what it refuses for longer ends the run, not the image."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import pickle
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from made_data import class_folders, train_loader
from PIL import Image

from tests.kit import train
from zerovision.delivery.predict import _list_images
from zerovision.models.weights_metadata import Preprocessing
from zerovision.planning.data_check import DataReport, decode_part
from zerovision.training.base.errors import FILE_SERVER_EXIT_CODE, FileServerError, UserError
from zerovision.training.data import DataOptions, archives, find_dataset, load_data
from zerovision.training.data.datasets import DatasetPair, ImageDataset
from zerovision.training.data.reading import files as image_files
from zerovision.training.data.reading.files import ImageError, read_file
from zerovision.training.data.reading.image_numbers import ModelInput

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
        original = {"open": os.open, "read": open, "list": os.scandir, "stat": os.stat, "load": np.load}[at]

        def failing(path, *arguments, **options):
            opened = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
            if not opened.endswith(name) or not left[0]:
                return original(path, *arguments, **options)
            left[0] -= 1
            if at != "read":
                raise OSError(code, os.strerror(code), opened)
            return BrokenFile(path, code)

        owner = {"read": image_files, "load": np}.get(at, os)
        monkeypatch.setattr(owner, {"read": "open", "list": "scandir"}.get(at, at), failing, raising=False)

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
        FileServerError, match=r"image\.png' cannot be read: Stale file handle, even after 7 s"
    ) as error:
        read_file(tmp_path / "image.png")
    assert waits == [1, 2, 4]
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


class SilentData(ImageDataset):
    """Images of a server that never answers; workers do not see what a test has patched."""

    def __init__(self, whole: ImageDataset) -> None:
        super().__init__(whole.source, whole.preprocessing)
        whole.source.read = read_nothing

    def read(self, epoch, index, draws, offset=0):
        return read_nothing(index)


def read_nothing(index, choose=None):
    raise FileServerError(f"image {index}", os.strerror(errno.ESTALE), 7)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_server_that_stays_silent_is_one_line_from_every_process(tmp_path, workers):
    pair = load_data(DataOptions(data=str(folder(tmp_path))))
    silent = dataclasses.replace(pair, train=SilentData(pair.train))
    for batches in (train_loader(silent, batch_size=2, workers=workers).epoch(0), [None]):
        with pytest.raises(FileServerError) as error:
            next(iter(batches)) or decode_part("train", workers, DataReport(silent))
        assert re.fullmatch(r"'image [0-3]' cannot be read: Stale file handle, even after 7 s[^\n]*", str(error.value))


READERS = {
    "predict": ("x.npy", "open", ModelInput(Preprocessing(4, None, (0.5,), (0.5,), values="float32")).read),
    "arrays": ("x.npz", "load", lambda path: load_data(DataOptions(data=f"npz:{path}"))),
    "a folder of classes": (
        "/train/a",
        "list",
        lambda path: load_data(DataOptions(data=str(Path(path).parents[1]))).fingerprint,
    ),
    "predict's folder": ("/train/a", "list", lambda path: list(_list_images([path], [".png"]))),
    "predict's word": ("/train/a", "stat", lambda path: list(_list_images([path], [".png"]))),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_is_patient(tmp_path, server, waits, reader):
    name, at, read = READERS[reader]
    path = str(folder(tmp_path) / "train/a") if at in ("list", "stat") else str(tmp_path / name)
    numbers, labels = np.zeros((2, 4, 4), np.uint8), np.array([0, 1])
    np.savez(tmp_path / "x.npz", x_train=numbers, y_train=labels, x_test=numbers, y_test=labels)
    np.save(tmp_path / "x.npy", np.zeros((4, 4), np.float32))
    Image.new("L", (4, 4)).save(tmp_path / "1.png")
    expected = read(path)
    server(name, at, errno.ESTALE, times=2)
    found = read(path)
    assert isinstance(found, (torch.Tensor, DatasetPair)) or found == expected
    assert waits == [1, 2]
    server(name, at, errno.ESTALE, times=10)
    with pytest.raises(FileServerError, match="Stale file handle"):
        read(path)


def test_predict_follows_links_once_and_passes_systems_over(tmp_path):
    root = folder(tmp_path / "data")
    for name in ("@eaDir", ".hidden"):
        shutil.copytree(root / "val", root / name)
    (root / "val" / "linked").symlink_to(root / "train" / "a")
    (root / "val" / "circle").symlink_to(root)
    expected = [
        f"{part}/{number}.png" for part in ("train/a", "train/b", "val/a", "val/b", "val/linked") for number in "01"
    ]
    assert [path for path, _ in _list_images([root], [".png"])] == [f"{root}/{name}" for name in expected]


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path, server):
    server("/train/a", "list", errno.EACCES, times=1)
    with pytest.raises(UserError, match="/train/a' cannot be listed: Permission denied"):
        list(_list_images([folder(tmp_path)], [".png"]))


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOENT, errno.ELOOP])
def test_what_is_wrong_with_the_file_is_said_at_once(tmp_path, server, waits, code):
    server("/image.png", "open", code, times=1)
    with pytest.raises(ImageError, match=os.strerror(code)):
        read_file(tmp_path / "image.png")
    assert waits == []


class UnknownEntry:
    """An entry of a folder whose type the file system does not tell: the server is asked, and fails to answer once.

    Attributes:
        before: How many questions it answers before that one, of all entries together.
    """

    before = 0

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self._entry, self.name, self.path = entry, entry.name, entry.path

    def __getattr__(self, question):
        def answer() -> object:
            UnknownEntry.before -= 1
            if UnknownEntry.before == -1:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), self.path)
            return getattr(self._entry, question)()

        return answer


@contextlib.contextmanager
def unknown_entries(path, scan=os.scandir):
    """As `os.scandir`."""
    with scan(path) as entries:
        yield map(UnknownEntry, entries)


@pytest.mark.parametrize(
    ("read", "least"),
    [
        (lambda root: load_data(DataOptions(data=str(root))).fingerprint, 20),
        (lambda root: list(_list_images([str(root)], [".png"])), 10),
        (lambda root: archives._find(root, ".png"), 2),
        (lambda root: find_dataset(str(root)), 1),
    ],
    ids=["folder", "predict", "archives", "data"],
)
def test_what_an_entry_is_is_asked_again(tmp_path, monkeypatch, waits, read, least):
    """Whichever question it is that the server does not answer."""
    root = folder(tmp_path)
    expected = read(root)
    monkeypatch.setattr(os, "scandir", unknown_entries)
    for before in range(1000):
        monkeypatch.setattr(UnknownEntry, "before", before)
        assert read(root) == expected
        if UnknownEntry.before >= 0:
            break
    assert least <= len(waits) == before < 1000


@pytest.mark.parametrize(("at", "name"), [("open", "/train/a/1.png"), ("open", "/val/b/0.png"), ("list", "/train/a")])
def test_a_run_ends_with_a_code_that_is_restarted(tmp_path, server, waits, capfd, at, name):
    server(name, at, errno.ESTALE, times=10**6)
    data, given = folder(tmp_path / "data"), {"bad_images": "skip:0.5", "cache": "off", "workers": "0"}
    train(tmp_path, code=FILE_SERVER_EXIT_CODE, data=str(data), image_size=32, batch_size=2, **given)
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if "Stale file handle" in line] == lines[-1:]
    assert lines[-1].startswith(f"error: '{data}{name}' cannot be read")
