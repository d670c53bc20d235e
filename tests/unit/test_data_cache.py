"""The cache of shrunk images: never another pixel than without it, whatever happens to its files."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from made_data import class_folders, train_loader
from PIL import Image

from tests.kit import ROOT, train, wait_until
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.loader import Loader
from zerovision.training.data.reading.sources import INDEX, PIXELS, ImageCache, open_cache
from zerovision.training.data.sampler import EvaluationPlan

IMAGES = 24


@pytest.fixture
def photos(tmp_path):
    """Two classes of JPEG files of several sizes in train/ and val/."""
    generator = np.random.Generator(np.random.PCG64(0))
    for folder in class_folders(tmp_path / "photos"):
        for number in range(IMAGES // 2):
            pixels = generator.integers(0, 256, (40 + number, 70, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:02}.jpg", quality=90)
    return tmp_path / "photos"


def options(photos: Path, cache: str = "disk", image_size: int = 16, **values) -> DataOptions:
    root = str(photos.parent / "root")
    return DataOptions(data=str(photos), image_size=image_size, cache=cache, data_root=root, **values)


def batches(given: DataOptions, workers: int = 0, epochs: int = 2) -> list[torch.Tensor]:
    """Images of all batches of training and evaluation, over some epochs."""
    pair = load_data(given)
    loader = train_loader(pair, 8, workers=workers)
    val = Loader(pair.val, EvaluationPlan(IMAGES, 8, 1), 0, workers=workers)
    images = [batch.images for epoch in range(epochs) for part in (loader.epoch(epoch), val) for batch in part]
    loader.close()
    val.close()
    return images


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def cache_folder(photos: Path) -> Path:
    (index,) = (photos.parent / "root" / "images").glob(f"*/{INDEX}")
    return index.parent


@pytest.mark.parametrize(("augmentation", "workers"), [("crop_flip", 0), ("randaugment", 0), ("none", 0), ("auto", 2)])
def test_a_cache_changes_no_pixel_and_is_used(photos, augmentation, workers, monkeypatch):
    assert load_data(options(photos, "off")).notes == []
    plain = batches(options(photos, "off", augmentation=augmentation))
    assert equal(batches(options(photos, augmentation=augmentation), workers), plain)
    # another run, in which nothing can be decoded
    monkeypatch.setattr("zerovision.training.data.reading.decode._decode_jpeg", None)
    assert equal(batches(options(photos, augmentation=augmentation)), plain)


@pytest.mark.parametrize("name", [INDEX, PIXELS])
def test_damage_costs_time_but_changes_no_pixel(photos, name):
    plain = batches(options(photos))
    file = cache_folder(photos) / name
    whole = file.read_bytes()
    generator = np.random.Generator(np.random.PCG64(1))
    flipped = bytearray(whole)
    for position in generator.integers(0, len(whole), 40):
        flipped[position] ^= 1 << int(generator.integers(8))
    for damaged in (bytes(flipped), whole[: len(whole) // 2], b"", os.urandom(len(whole)), whole[8:], whole * 2):
        file.write_bytes(damaged)
        assert equal(batches(options(photos)), plain)


def test_a_run_that_leaves_images_in_memory_says_how_to_free_it(photos, tmp_path, capsys):
    train(tmp_path / "logs", data=str(photos), image_size=16, cache="ram", batch_size=8)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "rm -r" in line)
    command = line.partition(": ")[2]
    folder = Path(command.split()[-1])
    assert (folder / INDEX).exists()
    assert folder.is_relative_to("/dev/shm")
    subprocess.run(command, shell=True, check=True)
    assert not folder.exists()


def test_the_cache_of_another_data_set_is_not_taken(photos):
    batches(options(photos))
    first = cache_folder(photos)
    content = {name: (first / name).read_bytes() for name in (INDEX, PIXELS)}
    shutil.rmtree(first)
    for path in photos.rglob("*.jpg"):
        pixels = np.asarray(Image.open(path))
        Image.fromarray(pixels[::-1].copy()).save(path, quality=90)
    plain = batches(options(photos, "off"))
    load_data(options(photos))
    second = cache_folder(photos)
    assert second != first
    for name in content:
        (second / name).write_bytes(content[name])
    assert equal(batches(options(photos)), plain)


def test_what_decides_the_pixels_decides_the_name(photos):
    root = photos.parent / "root" / "images"
    load_data(options(photos))
    load_data(options(photos, seed=3, augmentation="none"))
    assert len(list(root.glob(f"*/{INDEX}"))) == 1
    os.utime(photos / "val" / "a" / "00.jpg", ns=(0, 1))
    load_data(options(photos))
    load_data(options(photos, image_size=17))
    assert len(list(root.glob(f"*/{INDEX}"))) == 3


def test_what_does_not_fit_the_bound_is_decoded(photos):
    plain = batches(options(photos, "off"))
    bounded = options(photos, cache_gb=60e-6)
    for _ in range(2):
        assert equal(batches(bounded), plain)
        assert 30_000 < (cache_folder(photos) / PIXELS).stat().st_size <= 60_000


def test_a_full_disk_is_no_error(photos, monkeypatch):
    plain = batches(options(photos, "off"))
    write, left = os.pwrite, [20_000]

    def write_until_full(descriptor, data, offset):
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[: left[0]], offset)
        left[0] -= written
        return written

    monkeypatch.setattr(os, "pwrite", write_until_full)
    assert equal(batches(options(photos)), plain)
    assert (cache_folder(photos) / PIXELS).stat().st_size < 20_000
    monkeypatch.undo()
    assert equal(batches(options(photos)), plain)


WRITER = """
import sys
import numpy as np
from pathlib import Path
from zerovision.training.data.reading.sources import ImageCache

cache = ImageCache(Path(sys.argv[1]), 10**9)
print("ready", flush=True)
sys.stdin.readline()
for index in range(int(sys.argv[2])):
    cache.put(index, np.full((50, 40 + index % 7, 3), (index * 37 + 11) % 256, dtype=np.uint8), index + 1)
print("done", flush=True)
"""


def start_writers(folder: Path, count: int, images: int) -> list[subprocess.Popen]:
    words = [sys.executable, "-c", WRITER, str(folder), str(images)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writers = [subprocess.Popen(words, env=environment, text=True, **pipes) for _ in range(count)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    return writers


def whole_images(folder: Path, count: int) -> int:
    """Count the images of a `WRITER` that are there, and check each."""
    cache, found = ImageCache(folder, 10**9), 0
    for index in range(count):
        entry = cache.get(index)
        assert entry is None or index in cache
        if entry is not None:
            pixels, digest = entry
            assert digest == index + 1
            assert pixels.shape == (50, 40 + index % 7, 3)
            assert (pixels == (index * 37 + 11) % 256).all()
            found += 1
    return found


def test_processes_fill_a_cache_together(tmp_path):
    for writer in start_writers(tmp_path, 2, 300):
        assert writer.communicate(timeout=60)[0] == "done\n"
        assert writer.returncode == 0
    assert whole_images(tmp_path, 300) == 300


def test_a_cache_whose_writer_was_killed_is_good(tmp_path):
    (writer,) = start_writers(tmp_path, 1, 10**6)
    wait_until(lambda: (tmp_path / PIXELS).stat().st_size >= 10**6)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert 100 < whole_images(tmp_path, 10_000) < 10**6
    with (tmp_path / PIXELS).open("r+b") as file:  # as if the machine had lost what was written last
        file.truncate(10**6 - 3000)
    assert whole_images(tmp_path, 10_000) >= 100


def test_a_worker_that_starts_after_the_cache_was_removed_goes_without(tmp_path):
    pixels = np.full((4, 8, 3), 7, dtype=np.uint8)
    (tmp_path / "key").mkdir()
    cache = ImageCache(tmp_path / "key", 1000)
    cache.put(0, pixels, 7)
    sent = pickle.dumps(cache)
    np.testing.assert_array_equal(pickle.loads(sent).get(0)[0], pixels)
    shutil.rmtree(tmp_path / "key")
    orphan = pickle.loads(sent)
    assert orphan.get(0) is None
    orphan.put(0, pixels, 7)
    assert orphan.is_full
    np.testing.assert_array_equal(cache.get(0)[0], pixels)


def test_the_bound_is_one_of_all_caches_together(tmp_path):
    given = DataOptions(cache="disk", data_root=str(tmp_path), cache_gb=1e-6)
    first, note = open_cache(given, "first", 250)
    assert "fit beside" not in note
    for index in range(2):
        first.put(index, np.zeros((4, 8, 3), dtype=np.uint8), 7)  # 192 bytes of pixels, 64 of index
    second, note = open_cache(given, "second", 5000)
    assert (first.max_bytes, second.max_bytes) == (1000, 1000 - 256)
    assert "of which 0.00 GB still fit into" in note
    assert first.get(0) is not None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make what belongs to another user")
@pytest.mark.parametrize("planted", ["folder", "link", "link that leads nowhere"])
def test_what_another_user_planted_is_not_used(tmp_path, monkeypatch, planted):
    root = tmp_path / "ram"
    monkeypatch.setattr("zerovision.training.data.reading.sources._location", lambda given: (root, 1000))
    target = tmp_path / "target"
    if planted == "folder":
        root.mkdir()
    else:
        root.symlink_to(target)
    if planted == "link":
        target.mkdir()
    os.chown(root, 12345, 12345, follow_symlinks=False)
    cache, note = open_cache(DataOptions(cache="ram"), "key", 100)
    assert cache is None
    assert re.fullmatch(rf"no cache of decoded images: {tmp_path}/ram: (belongs to another user|File exists)", note)
    assert [*tmp_path.glob("target/*" if planted == "link" else "target")] == []


def test_a_folder_that_cannot_be_used_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "ram"
    monkeypatch.setattr("zerovision.training.data.reading.sources._location", lambda given: (place, 1000))
    cache, note = open_cache(DataOptions(cache="ram"), "key", 10)
    assert cache is None
    assert "Not a directory" in note
