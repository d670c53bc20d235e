"""Checkpoints on the disk: what was put in comes out, a kill leaves a whole one, and a damaged one is passed over."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from small_checkpoints import ALONE, MOMENTS, SHAPES, PretendedRank, holds_weights_of, newest, write_checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kit import ELEMENTWISE, assert_equal, assert_same_but_rounding
from tests.stored_tensors import whole_tensors
from zerovision.training.base import files
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import unfinished
from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint import manifest as manifest_module
from zerovision.training.checkpoint import shards, store
from zerovision.training.checkpoint.manifest import MANIFEST_FILE, Manifest, ShardFacts, read_manifest, shard_name
from zerovision.training.checkpoint.shards import CheckpointReader, Snapshot, write_shard
from zerovision.training.checkpoint.store import (
    TrainState,
    checkpoint_name,
    discard,
    find_candidates,
    restore,
    temporary_folder,
)
from zerovision.training.engines.parameter_shards import EngineState, ParameterShard
from zerovision.training.tasks.scores import ScoreSums
from zerovision.training.world.world import World

pytestmark = pytest.mark.usefixtures("no_sync")
OLD, NEW = Progress(epoch=0, step=1), Progress(epoch=1, step=2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_weights_and_moments_come_out_whole(tmp_path, ranks):
    path = write_checkpoint(tmp_path, NEW, ranks=ranks)
    reader = CheckpointReader(path, read_manifest(path))
    expected = PretendedRank()
    assert set(reader.tensors) == {"weights", *MOMENTS}
    for kind, tensors in {"weights": expected.weights, **expected.moments}.items():
        read = whole_tensors(reader)[kind]
        assert list(read) == list(SHAPES)
        assert_equal(read, tensors)


def test_a_parameter_is_cut_across_the_ranks():
    # Else the tests above would show less than they say.
    holders = [{shard.name for shard in PretendedRank(rank, 2).state().shards} for rank in (0, 1)]
    assert holders[0] & holders[1]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_buffers_and_sums_on_another_number_of_ranks(tmp_path, size):
    path = write_checkpoint(tmp_path, NEW, ranks=2)
    reader = CheckpointReader(path, read_manifest(path))
    saved = [PretendedRank(rank, 2) for rank in range(2)]
    for rank in range(size):
        means = [engine.module.norm_mean for engine in saved]
        expected = means[rank] if size == 2 else (means[0] + means[1]) / 2
        buffers = reader.buffers([rank], size)
        assert_same_but_rounding(buffers["norm_mean"][0], expected, 0 if size == 2 else ELEMENTWISE)
        assert buffers["norm_batches"].tolist() == [11]
        assert buffers["norm_batches"].dtype == torch.int64
    shares = torch.stack([reader.epoch_sums(rank, size) for rank in range(size)])
    torch.testing.assert_close(shares.sum(0), saved[0].epoch_sums + saved[1].epoch_sums, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_fresh_engine_is_filled(tmp_path, size):
    write_checkpoint(tmp_path, NEW, seed=3, ranks=2)
    found, _ = newest(tmp_path)
    engine, sums = PretendedRank(seed=4), ScoreSums(2, ALONE.device)
    state = TrainState(engine, sums, Progress())
    restore(found, state, World(0, 0, size, size, ALONE.device))
    assert state.progress == NEW
    expected = PretendedRank(0, 2, seed=3)
    assert_equal(engine.weights, expected.weights)
    for kind in MOMENTS:
        assert_equal(engine.moments[kind], expected.moments[kind])
    assert engine.applied_steps == 9
    if size == 2:
        assert torch.equal(engine.module.norm_mean, expected.module.norm_mean)
        assert torch.equal(sums.state(), expected.epoch_sums)


@pytest.mark.parametrize("block", [1, 128, 2**27])
def test_a_snapshot_is_a_copy(monkeypatch, block):
    monkeypatch.setattr(shards, "BLOCK", block)
    engine, snapshot = PretendedRank(), Snapshot()
    for _ in range(2):  # the second uses the memory of the first again
        state = engine.state()
        weights = {
            shards.box_key("weights", shard.name, shard.offsets): shard.tensors["weights"].clone()
            for shard in state.shards
        }
        mean, sums = engine.module.norm_mean, engine.epoch_sums
        before = weights | {"buffer/norm_mean@0,0": mean.clone()[None], "epoch_sums/@0,0": sums.clone()[None]}
        snapshot.take(state, sums)
        mean += 1
        sums += 1
        assert all(torch.equal(snapshot.tensors[name], tensor) for name, tensor in before.items())


class PinnedMemory(TorchDispatchMode):
    """Counts the calls that allocate it."""

    calls = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.calls += bool((named or {}).get("pin_memory"))
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize(("block", "calls"), [(shards.BLOCK, 1), (256, 2), (1, len(SHAPES) + 2)])
def test_a_snapshot_of_a_gpu_pins_a_few_blocks_once(monkeypatch, block, calls):
    for name in ("current_stream", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(torch.Tensor, "record_stream", mock.Mock())
    monkeypatch.setattr(shards, "BLOCK", block)
    snapshot = Snapshot()
    with FakeTensorMode(allow_non_fake_inputs=True), PinnedMemory() as pinned:
        weights = {name: torch.empty(shape, device="cuda") for name, shape in SHAPES.items()}
        offloaded = {name: torch.empty(shape) for name, shape in SHAPES.items()}
        parts = [
            ParameterShard(name, (0,) * len(shape), {"weights": weights[name], "exp_avg": offloaded[name]})
            for name, shape in SHAPES.items()
        ]
        buffers = {"norm_batches": torch.empty(1, dtype=torch.int64, device="cuda")}
        state = EngineState(SHAPES, ("exp_avg",), parts, buffers, (0,), 9)
        for _ in range(2):
            snapshot.take(state, torch.empty(4, dtype=torch.float64, device="cuda"))
    assert pinned.calls == calls
    assert len(snapshot.tensors) == 2 * len(SHAPES) + 2
    for name, shape in SHAPES.items():
        assert snapshot.tensors[shards.box_key("weights", name, [0] * len(shape))].shape == shape
    assert {tensor.device.type for tensor in snapshot.tensors.values()} == {"cpu"}


def fill_up(disk):
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1024)):
            pass


def test_a_full_disk_is_an_error_that_the_saver_knows(small_disk):
    engine, snapshot = PretendedRank(), Snapshot()
    snapshot.take(engine.state(), engine.epoch_sums)
    fill_up(small_disk)
    with pytest.raises((OSError, SafetensorError), match="No space"):
        write_shard(small_disk / "shard", snapshot)
    with pytest.raises(OSError, match="No space"):
        manifest_module.write_manifest(small_disk, Manifest(NEW, {}, {}, 0, None, {}, (ShardFacts(1, "0"),)))


def test_a_manifest_comes_out_as_it_went_in(tmp_path):
    progress = Progress(3, 7, best_score=0.1 + 0.2, best_epoch=2, epochs_without_better=1, skipped_steps=4)
    given = Manifest(
        progress=progress,
        identity={"class list": ["Katze", "犬", 'a"b'], "model": {"depth": 3}},
        config={"learning_rate": 1 / 3, "resume": "auto"},
        applied_steps=123,
        loss_scale={"value": 65536.0, "good_steps": 12.0},
        parameters={"weight": [4, 3], "scale": []},
        shards=(ShardFacts(10, "ab"), ShardFacts(11, "cd")),
        data_ranks=2,
    )
    manifest_module.write_manifest(tmp_path, given)
    assert read_manifest(tmp_path) == given


# Kills at every step of a commit.


class Killed(BaseException):
    """Not an Exception, as nothing may tidy up behind a kill."""


def dying(patch, at_call):
    """Let the functions by which a commit changes the disk die from the `at_call`-th call on; return the calls."""
    calls = []

    def guard(owner, name, before_death=None):
        original = getattr(owner, name)

        def guarded(*arguments, **options):
            calls.append(name)
            if len(calls) == at_call and before_death:
                before_death(*arguments)
            if len(calls) >= at_call:
                raise Killed
            return original(*arguments, **options)

        patch.setattr(owner, name, guarded)

    def half_of(path, text, **_):
        path.write_bytes(text.encode()[: len(text) // 2])

    def first_file_of(path, **_):
        for file in sorted(Path(path).glob("*"))[:1]:
            file.unlink()

    guard(Path, "rename")
    guard(Path, "unlink")
    guard(os, "replace")
    guard(Path, "write_text", half_of)
    guard(shutil, "rmtree", first_file_of)
    guard(files, "sync_to_disk")
    guard(store, "sync_to_disk")
    guard(manifest_module, "sync_to_disk")
    return calls


@pytest.mark.parametrize(("older", "keep_last"), [([OLD], 1), ([OLD, NEW], 2), ([NEW], 1)])
def test_a_kill_at_any_step_of_a_commit_leaves_a_whole_checkpoint(tmp_path, older, keep_last):
    outcomes = set()
    for at_call in range(1, 100):
        folder = tmp_path / str(at_call)
        for seed, progress in enumerate(older):
            write_checkpoint(folder, progress, seed=seed)
        with pytest.MonkeyPatch.context() as patch:
            calls = dying(patch, at_call)
            try:
                write_checkpoint(folder, NEW, seed=9, keep_last=keep_last, is_best=True)
                break
            except Killed:
                pass
        found, _ = newest(folder)
        is_new = holds_weights_of(found, 9)
        # A new one of the same step, as long as it is not there, may also give way to the one before both.
        assert is_new or any(holds_weights_of(found, seed) for seed in range(len(older))), calls[-1]
        outcomes.add(is_new)
        write_checkpoint(folder, Progress(epoch=2), seed=10, keep_last=1)
        assert holds_weights_of(newest(folder)[0], 10)
        best = {folder.joinpath("best").read_text().strip()} if folder.joinpath("best").exists() else set()
        left = {path.name for path in folder.iterdir()}
        assert left - {"last", "best"} == {"step-00002-0000000"} | best
    assert len(calls) < at_call, "the last round had no kill"
    assert outcomes == {True, False}, "kills before and after the new one counts"


def test_all_is_on_the_disk_before_its_name_and_that_before_the_pointer(tmp_path, monkeypatch):
    log = []
    rename, replace = Path.rename, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: log.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
    )
    monkeypatch.setattr(Path, "rename", lambda a, b: (log.append(("name", str(b))), rename(a, b))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (log.append(("name", str(b))), replace(a, b))[1])
    path = write_checkpoint(tmp_path, NEW, ranks=2, is_best=True)
    temporary = temporary_folder(tmp_path, path.name)
    shards = [temporary / shard_name(rank) for rank in range(2)]
    expected = [step for shard in shards for step in (("sync", unfinished(shard, "tmp") / shard.name), ("name", shard))]
    expected += [("sync", temporary / MANIFEST_FILE), ("sync", temporary), ("name", path), ("sync", tmp_path)]
    for pointer in ("last", "best"):
        expected += [("sync", unfinished(tmp_path / pointer, "tmp")), ("name", tmp_path / pointer), ("sync", tmp_path)]
    assert log == [(action, str(file)) for action, file in expected]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_the_newest_and_the_best_are_kept(tmp_path, keep_last):
    for step in range(6):
        write_checkpoint(tmp_path, Progress(step=step), keep_last=keep_last, is_best=step == 1)
    steps = {int(path.name[-7:]) for path in tmp_path.glob("step-*")}
    assert steps == {1, *range(6 - keep_last, 6)}
    assert (tmp_path / "best").read_text().strip() == checkpoint_name(Progress(step=1))
    assert newest(tmp_path)[0].manifest.progress.step == 5


def test_checkpoints_of_an_abandoned_future_are_removed(tmp_path):
    for step in (1, 2, 8, 9):
        write_checkpoint(tmp_path, Progress(step=step), seed=step, keep_last=9)
    (tmp_path / "last").write_text(checkpoint_name(Progress(step=2)) + "\n")
    assert newest(tmp_path)[0].manifest.progress.step == 2
    write_checkpoint(tmp_path, Progress(step=3), keep_last=9)
    assert sorted(int(path.name[-7:]) for path in tmp_path.glob("step-*")) == [1, 2, 3]


def test_the_same_step_again_replaces_the_checkpoint(tmp_path):
    write_checkpoint(tmp_path, OLD, seed=1)
    write_checkpoint(tmp_path, OLD, seed=2, keep_last=1)
    assert holds_weights_of(newest(tmp_path)[0], 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", checkpoint_name(OLD)]


def test_checkpoints_are_sorted_by_position(tmp_path):
    for progress in (Progress(99_999, 3), Progress(100_000, 1), Progress(100_000, 12_345_678)):
        write_checkpoint(tmp_path, progress)
    assert newest(tmp_path)[0].manifest.progress.step == 12_345_678


def test_a_failed_checkpoint_is_discarded(tmp_path):
    write_checkpoint(tmp_path, OLD)
    half = temporary_folder(tmp_path, checkpoint_name(NEW))
    half.mkdir()
    (half / shard_name(0)).write_bytes(b"half")
    assert newest(tmp_path)[0].manifest.progress == OLD
    discard(tmp_path, checkpoint_name(NEW))
    assert not half.exists()


# What --resume means.


def test_resume_means_what_it_says(tmp_path):
    own, other = tmp_path / "own" / "checkpoints", tmp_path / "other" / "checkpoints"
    path = write_checkpoint(own, OLD)
    elsewhere = write_checkpoint(other, NEW)
    for resume, is_restart, expected in [
        ("never", False, []),
        ("never", True, [path]),
        ("auto", False, [path]),
        ("must", False, [path]),
        (str(elsewhere), False, [elsewhere]),
        (str(other), False, [elsewhere]),
        (str(other.parent), False, [elsewhere]),
        (str(other.parent), True, [path]),
    ]:
        assert find_candidates(resume, own, is_restart=is_restart)[0] == expected, (resume, is_restart)
    assert find_candidates("auto", tmp_path / "nothing", is_restart=True)[0] == []


@pytest.mark.parametrize("resume", ["must", "/nowhere", "~nobody-of-that-name/x", "x" * 5000, "a\nb", ""])
def test_resume_from_nothing_is_one_line(tmp_path, monkeypatch, resume):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        find_candidates(resume, tmp_path / "checkpoints", is_restart=False)
    assert str(caught.value).isprintable()
    assert "--resume" in str(caught.value)
