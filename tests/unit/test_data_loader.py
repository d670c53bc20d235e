"""Batches: the same bytes for any number of ranks and workers; bad images; workers that live and die as they should."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from multiprocessing.synchronize import SemLock
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from made_data import class_folders, save_animation, train_loader
from PIL import Image

from tests.kit import ALONE, ROOT, wait_until
from zerovision.training.base.errors import UserError
from zerovision.training.config import TrainConfig
from zerovision.training.data import DataOptions, bad_image_share, bad_images, load_data
from zerovision.training.data.loader import Loader, automatic_workers, build_loaders
from zerovision.training.data.sampler import BatchPlan, EvaluationPlan
from zerovision.training.world.world import World

IMAGES_PER_CLASS = 30


@pytest.fixture
def folder(tmp_path):
    """Two classes of 30 images in train/ and in val/."""
    generator = np.random.Generator(np.random.PCG64(0))
    for classes in class_folders(tmp_path):
        for number in range(IMAGES_PER_CLASS):
            image = Image.fromarray(generator.integers(0, 256, (20, 30, 3), dtype=np.uint8))
            image.save(classes / f"{number:02}.png")
    return tmp_path


def load_folder(root, **values):
    return load_data(DataOptions(data=str(root), image_size=16, **values))


def damage(root: Path, *names: str) -> list[str]:
    for name in names:
        (root / name).write_text("text")
    return [str(root / name) for name in names]


def epoch_bytes(pair, world, accumulation, workers, epoch=1, repeats=1) -> dict[tuple[int, int], list[bytes]]:
    """Every micro-batch of an epoch by (step, place in the global batch): images, labels, weights, indices."""
    plan = BatchPlan(len(pair.train), 16 // (world * accumulation), accumulation, world, seed=0, repeats=repeats)
    found = {}
    for rank in range(world):
        loader = Loader(pair.train, plan, rank, workers=workers)
        for number, batch in enumerate(loader.epoch(epoch)):
            step, micro_step = divmod(number, accumulation)
            leaf, leaves = rank * accumulation + micro_step, world * accumulation
            for sample in range(len(batch.labels)):
                # Repeated samples are dealt to the micro-batches.
                place = leaf * plan.batch_size_per_rank + sample if repeats == 1 else leaf + leaves * sample
                parts = (batch.images, batch.labels, batch.weights, batch.indices)
                found[step, place] = [part[sample].numpy().tobytes() for part in parts]
        loader.close()
    return found


POLICIES = ("randaugment", "trivialaugment", "autoaugment")


@pytest.mark.parametrize(
    ("augmentation", "repeats", "sizes"),
    [("crop_flip", 1, "8:0:2"), *((name, 1, "") for name in POLICIES), ("3augment", 3, "")],
)
def test_same_bytes_for_any_ranks_accumulation_and_workers(folder, augmentation, repeats, sizes):
    jitter = 0.4 if augmentation == "trivialaugment" else 0.0
    pair = load_folder(folder, augmentation=augmentation, progressive_size=sizes, color_jitter=jitter)
    expected = epoch_bytes(pair, world=1, accumulation=1, workers=0, repeats=repeats)
    assert len(expected) == 64  # 60 images and 4 of padding
    for world, accumulation, workers in ((2, 1, 0), (8, 1, 0), (2, 2, 0), (1, 1, 2)):
        assert epoch_bytes(pair, world, accumulation, workers, repeats=repeats) == expected
    assert epoch_bytes(pair, 1, 1, 0, epoch=2, repeats=repeats) != expected


@pytest.mark.parametrize(
    "options",
    [
        {"augmentation": "shift_flip"},
        {"augmentation": "crop_flip"},
        {"augmentation": "trivialaugment", "crop_scale": "1,1", "crop_ratio": "1,1", "mirror": "off"},
    ],
)
def test_copies_of_a_sample_are_augmented_differently(options):
    pair = load_data(DataOptions(data="fake", image_size=24, **options))
    once, plan = train_loader(pair, len(pair.train)), BatchPlan(len(pair.train), 3, 1, 1, 0, repeats=3)
    copies = next(Loader(pair.train, plan, 0).epoch(0))
    assert len(set(copies.indices.tolist())) == 1
    assert len({image.numpy().tobytes() for image in copies.images}) == 3
    batch = next(once.epoch(0))
    alone = batch.images[batch.indices == copies.indices[0]]
    assert torch.equal(copies.images[:1], alone), "the first copy is the sample without copies"
    for image, draw_key in zip(copies.images, plan.draw_keys(0).tolist(), strict=False):
        assert torch.equal(image, pair.train[0, draw_key][0])


def test_shapes_and_types():
    pair = load_data(DataOptions())
    batch = next(train_loader(pair, 5).epoch(0))
    assert [(t.shape, t.dtype) for t in (batch.images, batch.labels, batch.weights, batch.indices)] == [
        ((5, 3, 32, 32), torch.float32),
        ((5,), torch.int64),
        ((5,), torch.float32),
        ((5,), torch.int64),
    ]
    assert (batch.bad_images, batch.notes) == ({}, {})


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_a_step_gives_the_rest_of_the_epoch(folder, workers):
    pair = load_folder(folder)
    plan = BatchPlan(len(pair.train), 4, 2, 1, seed=3)
    loader = Loader(pair.train, plan, 0, workers=workers)
    whole = list(loader.epoch(2))
    abandoned = loader.epoch(2)
    next(abandoned)  # workers have read ahead by now; what they hold must not leak into the next epoch
    rest = list(loader.epoch(2, first_step=3))
    assert len(rest) == len(whole) - 6
    for first, second in zip(rest, whole[6:], strict=True):
        assert torch.equal(first.images, second.images)
        assert torch.equal(first.indices, second.indices)
    loader.close()


def test_the_dropout_stream_is_not_disturbed(folder):
    pair = load_folder(folder)
    torch.manual_seed(0)
    expected = torch.rand(8)
    for workers in (0, 1):
        torch.manual_seed(0)
        loader = train_loader(pair, 20, workers=workers)
        drawn = torch.cat([torch.rand(4) for epoch in range(2) for _ in [len(list(loader.epoch(epoch)))]])
        loader.close()
        assert torch.equal(drawn, expected)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_evaluation_counts_every_image_once(world):
    pair = load_data(DataOptions())
    plan = EvaluationPlan(len(pair.val), 32, world)
    counts, labels = torch.zeros(360), torch.full((360,), -1)
    for rank in range(world):
        loader = Loader(pair.val, plan, rank)
        batches = list(loader)
        assert len(batches) == len(loader) == plan.batches_per_rank
        for batch in batches:
            counts.index_add_(0, batch.indices, batch.weights)
            labels[batch.indices] = batch.labels
    assert torch.equal(counts, torch.ones(360))
    assert torch.equal(labels, pair.val.source.labels)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_image_is_one_line_in_the_main_process(folder, workers):
    (path,) = damage(folder, "train/b/07.png")
    pair = load_folder(folder)
    loader = train_loader(pair, 4, workers=workers)
    with pytest.raises(UserError, match="not an image") as caught:
        list(loader.epoch(0))
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_skipped_image_weighs_nothing_and_is_listed_once_and_so_are_notes(folder, workers):
    (path,), noted = damage(folder, "train/b/07.png"), folder / "train" / "a" / "00.png"
    save_animation(noted, (30, 20))
    pair = load_folder(folder, bad_images="skip", augmentation="none")
    loader = train_loader(pair, 6, workers=workers)
    bad_index, following = IMAGES_PER_CLASS + 7, pair.train[0, IMAGES_PER_CLASS + 8][0]
    for epoch in range(2):
        weights, listed = torch.zeros(60), {}
        for batch in loader.epoch(epoch):
            weights.index_add_(0, batch.indices, batch.weights)
            listed |= batch.bad_images
            if batch.bad_images:
                assert torch.equal(batch.images[batch.indices == bad_index][0], following)
        assert listed == {path: "not an image of a known format"}
        expected = torch.ones(60)
        expected[bad_index] = 0
        assert torch.equal(weights, expected)
    assert loader.bad_images == listed
    assert loader.notes == {str(noted): "several frames or pages: the first is used"}
    loader.close()


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("skip", ("train/a/03.png", "train/b/07.png")),
        ("skip", ("train/a/03.png", "train/a/04.png")),
        ("skip:0.05", ("train/a/03.png", "train/a/04.png", "train/a/05.png", "train/b/07.png")),
    ],
)
def test_more_bad_images_than_the_share_end_the_run_and_no_fewer(folder, mode, names):
    paths = damage(folder, *names)
    pair = load_folder(folder, bad_images=mode)
    with pytest.raises(UserError, match=f"more than {len(names) - 1} of 60 images"):
        list(train_loader(pair, 4).epoch(0))
    shutil.copy(folder / "train" / "b" / "00.png", paths[-1])
    loader = train_loader(pair, 4)
    weights = sum(float(batch.weights.sum()) for epoch in range(2) for batch in loader.epoch(epoch))
    assert weights == 2 * (60 - len(names) + 1)
    assert set(loader.bad_images) == set(paths[:-1])


@pytest.mark.parametrize(
    ("mode", "total", "most"),
    [
        ("error", 10**6, 0),
        *(("skip", total, most) for total, most in ((1, 1), (999, 1), (1999, 1), (2000, 2), (1_281_167, 1281))),
        ("skip:0.29", 100, 29),  # 28 in floating-point numbers
        ("skip:.5", 3, 1),
        ("skip:0.000000001", 10, 1),
    ],
)
def test_the_share_is_rounded_down_to_one_image_or_more(mode, total, most):
    assert bad_images.bad_image_budget(bad_image_share(mode), total) == most


def test_more_finds_than_one_message_holds_are_listed(monkeypatch):
    monkeypatch.setattr(bad_images, "FILES_PER_MESSAGE", 2)
    loader = Loader(load_data(DataOptions(bad_images="skip")).val, EvaluationPlan(360, 8, 1), 0)
    loader.bad_images = dict.fromkeys("edcba", "cut")
    assert list(bad_images.bad_image_lines([loader], ALONE)) == [
        "5 unreadable images skipped: a (cut), b (cut), c (cut), d (cut), e (cut)"
    ]
    with pytest.raises(UserError, match="more than 1 of 360 images"):
        bad_images.check_bad_images(loader, ALONE)


def test_automatic_workers(folder, monkeypatch):
    files, memory = load_folder(folder).train, load_data(DataOptions()).train
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    gpu = torch.device("cuda")
    assert automatic_workers(memory, 1000, replace(ALONE, device=gpu)) == 0
    assert automatic_workers(files, 1000, ALONE) == 0
    for batches, ranks, expected in ((1000, 1, 63), (1000, 8, 7), (1000, 64, 1), (5, 1, 5)):
        assert automatic_workers(files, batches, World(0, 0, ranks, ranks, gpu)) == expected


def contents(batches):
    return [[part.numpy().tobytes() for part in (b.images, b.labels, b.weights, b.indices)] for b in batches]


def test_both_parts_are_read_by_the_same_workers(folder):
    """Each in its order, whatever they have read ahead of the other; with bad images, those of each part."""
    paths = damage(folder, "train/b/07.png", "val/a/00.png")
    pair, plan = load_folder(folder, bad_images="skip"), BatchPlan(60, 4, 1, 1, seed=3)
    expected, found = [], []
    for workers, read in ((0, expected), (2, found)):
        train, val = build_loaders(TrainConfig(batch_size=4, workers=str(workers)), pair, plan, ALONE)
        read += [contents(train.epoch(0)), contents(val)]
        abandoned = train.epoch(1)
        read += [contents([next(abandoned)]), contents(val), contents(train.epoch(1, first_step=9)), contents(val)]
        assert [set(loader.bad_images) for loader in (train, val)] == [{path} for path in paths]
        assert val.bad_images == {paths[1]: "not an image of a known format"}
        assert sum(batch.weights.sum() for batch in val) == 59, "a skipped image has no weight"
        if workers:
            with pytest.raises(RuntimeError, match="read other batches now"):
                next(abandoned)
            assert len(running_workers()) == workers
        for loader in (train, val):
            loader.close()
    assert found == expected
    del abandoned
    wait_until(lambda: not running_workers())


TRAINER = """
import signal, sys, time
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.loader import Loader
from zerovision.training.data.sampler import BatchPlan

def main():
    received = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received.append(number))
    pair = load_data(DataOptions(data=sys.argv[1], image_size=16))
    loader = Loader(pair.train, BatchPlan(60, 2, 1, 1, 0), 0, workers=2)
    batches = loader.epoch(0)
    next(batches)
    print("ready", flush=True)
    while len(received) < 2:
        time.sleep(0.02)
    rest = sum(1 for _ in batches) + sum(1 for _ in loader.epoch(1))
    print("read", rest, flush=True)
    signal.pause()

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_workers_survive_the_signals_of_a_launcher_and_die_with_the_trainer(folder, tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen(
        [sys.executable, script, folder], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        assert trainer.stdout.readline() == "ready\n"
        workers = psutil.Process(trainer.pid).children(recursive=True)
        assert len(workers) >= 3  # two workers and the fork server
        os.killpg(trainer.pid, signal.SIGTERM)
        os.killpg(trainer.pid, signal.SIGINT)
        assert trainer.stdout.readline() == f"read {29 + 30}\n"
        trainer.kill()
        trainer.wait()
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


def running_workers():
    """The processes that the fork server of this one has started and that have not ended."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            is_child_of_server = "forkserver" in " ".join(process.parent().cmdline())
            found += [process] if is_child_of_server and process.status() != psutil.STATUS_ZOMBIE else []
    return found


def test_a_closed_loader_has_ended_its_workers_and_given_its_semaphores_back(folder):
    """A process may end at once: what is left then, Python's tracker of resources complains of."""
    for _ in range(3):
        loader = train_loader(load_folder(folder), 30, workers=2)
        list(loader.epoch(0))
        assert len(running_workers()) == 2
        loader.close()
        assert not [one for one in gc.get_objects() if SemLock in type(one).__mro__]
        wait_until(lambda: not running_workers())
