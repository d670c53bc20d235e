"""Damaged checkpoints and pointers: each is named, and the checkpoint before it is taken."""

from __future__ import annotations

import os
import random
import shutil

import pytest
from small_checkpoints import forge_manifest, holds_weights_of, newest, write_checkpoint

from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint.manifest import FORMAT, MANIFEST_FILE, UnusableCheckpoint, read_manifest, shard_name
from zerovision.training.checkpoint.shards import verify_shard
from zerovision.training.checkpoint.store import checkpoint_name

pytestmark = pytest.mark.usefixtures("no_sync")
OLD, NEW = Progress(epoch=0, step=1), Progress(epoch=1, step=2)


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << (position % 8)
    path.write_bytes(content)


def edit_number(checkpoint):
    path = checkpoint / MANIFEST_FILE
    path.write_text(path.read_text().replace('"applied_steps": 9', '"applied_steps": 8'))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "shard cut": lambda path: cut(path / shard_name(1)),
    "shard empty": lambda path: (path / shard_name(0)).write_bytes(b""),
    "shard longer": lambda path: (path / shard_name(0)).open("ab").write(b"\0"),
    "shard missing": lambda path: (path / shard_name(1)).unlink(),
    "shards swapped": lambda path: (path / shard_name(1)).replace(path / shard_name(0)),
    "bit of the header": lambda path: flip(path / shard_name(0), 40),
    "bit of the last number": lambda path: flip(path / shard_name(1), -1),
    "number edited": edit_number,
    "manifest cut": lambda path: cut(path / MANIFEST_FILE),
    "manifest empty": lambda path: (path / MANIFEST_FILE).write_bytes(b""),
    "manifest of zeros": lambda path: (path / MANIFEST_FILE).write_bytes(bytes(500)),
    "manifest not UTF-8": lambda path: (path / MANIFEST_FILE).write_bytes(b"\xff\xfe{}"),
    "manifest missing": lambda path: (path / MANIFEST_FILE).unlink(),
    "manifest of another format": lambda path: forge_manifest(path, lambda c: c.update(format=FORMAT + "1")),
    "folder empty": lambda path: [file.unlink() for file in path.iterdir()],
    "file instead of a folder": lambda path: (shutil.rmtree(path), path.write_text("x")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(tmp_path, damage):
    write_checkpoint(tmp_path, OLD, seed=1)
    path = write_checkpoint(tmp_path, NEW, seed=2)
    DAMAGES[damage](path)
    found, notes = newest(tmp_path)
    assert found.manifest.progress == OLD
    assert holds_weights_of(found, 1)
    (note,) = notes
    assert note.startswith(f"{path}: ")
    assert note.isprintable()


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    """Else the next save would remove the good one before it, and keep the damaged one."""
    write_checkpoint(tmp_path, OLD, seed=1)
    cut(write_checkpoint(tmp_path, NEW, seed=2) / shard_name(0))
    newest(tmp_path)
    write_checkpoint(tmp_path, Progress(epoch=1, step=3), seed=3, keep_last=2)
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == ["step-00000-0000001", "step-00001-0000003"]


def test_no_flipped_bit_of_a_shard_passes(tmp_path):
    path = write_checkpoint(tmp_path, NEW)
    facts = read_manifest(path).shards
    chance = random.Random(0)
    for _ in range(40):
        rank = chance.randrange(2)
        shard = path / shard_name(rank)
        position = chance.randrange(facts[rank].bytes)
        flip(shard, position)
        with pytest.raises(UnusableCheckpoint, match=shard.name):
            verify_shard(shard, facts[rank])
        flip(shard, position)
    for rank in range(2):
        verify_shard(path / shard_name(rank), facts[rank])


def test_no_flipped_bit_of_a_manifest_changes_what_is_read(tmp_path):
    path = write_checkpoint(tmp_path, NEW)
    given = read_manifest(path)
    size = (path / MANIFEST_FILE).stat().st_size
    messages = []
    for position in range(0, size, 5):
        flip(path / MANIFEST_FILE, position)
        try:
            read = read_manifest(path)
        except UnusableCheckpoint as error:
            read = None
            messages.append(str(error))
        assert read in (None, given)  # a blank may have become another blank
        flip(path / MANIFEST_FILE, position)
    assert len(messages) > size / 10
    assert all(message.isprintable() for message in messages)


def test_nothing_is_chosen_where_all_are_damaged(tmp_path):
    for seed, progress in enumerate((OLD, NEW)):
        cut(write_checkpoint(tmp_path, progress, seed=seed) / shard_name(0))
    found, notes = newest(tmp_path)
    assert found is None
    assert [note.split(": ")[0] for note in notes] == [str(tmp_path / checkpoint_name(p)) for p in (NEW, OLD)]


POINTERS = {
    "missing": lambda at: None,
    "empty": lambda at: at.write_bytes(b""),
    "garbage": lambda at: at.write_bytes(bytes(range(256))),
    "outside": lambda at: at.write_bytes(b"../../x\n"),
    "absolute": lambda at: at.write_bytes(b"/etc/step-00001-0000002\n"),
    "huge": lambda at: at.write_bytes(b"step-00001-0000002" * 10**6),
    "dangling": lambda at: at.write_bytes(b"step-00007-0000000\n"),
    "before all": lambda at: at.write_bytes(b"step-00000-0000000\n"),
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda at: at.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(60)  # a reader that waits for a pipe fails instead of hanging
@pytest.mark.parametrize("pointer", POINTERS)
def test_a_damaged_pointer_is_named_and_the_newest_taken(tmp_path, pointer):
    for seed, progress in enumerate((OLD, NEW)):
        write_checkpoint(tmp_path, progress, seed=seed)
    (tmp_path / "last").unlink()
    POINTERS[pointer](tmp_path / "last")
    found, notes = newest(tmp_path)
    assert found.manifest.progress == NEW
    (note,) = notes
    assert note.startswith(f"{tmp_path / 'last'} ")
    assert note.isprintable()
    assert len(note) < 400


def test_a_damaged_best_pointer_costs_no_newest(tmp_path):
    write_checkpoint(tmp_path, OLD, is_best=True)
    (tmp_path / "best").write_text("../../x")
    write_checkpoint(tmp_path, NEW, keep_last=1)
    assert newest(tmp_path)[0].manifest.progress == NEW
