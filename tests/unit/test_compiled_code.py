"""Compiled code kept between starts: found again, never half of it, never somebody else's."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
import torch
from small_checkpoints import ALONE
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from training.parallel import compiled_code
from training.parallel.compiled_code import VARIABLE, CompiledCode

pytestmark = pytest.mark.usefixtures("no_sync")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / ".cache" / "zerovision" / "compiled"


def open_code(recipe="recipe") -> tuple[CompiledCode, Path]:
    code = CompiledCode(recipe, ALONE)
    return code, Path(os.environ[VARIABLE])


def keep(content: bytes, recipe="recipe") -> None:
    """A start that compiles one library, beside a lock and a file that is being written."""
    code, folder = open_code(recipe)
    (folder / "ab").mkdir(exist_ok=True)
    for name in ("kernel.so", "kernel.lock", ".7.tmp"):
        (folder / "ab" / name).write_bytes(content)
    code.close()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_next_start_finds_what_is_complete_and_nothing_is_left_beside_it(home, monkeypatch):
    keep(b"compiled")
    (kept,) = home.iterdir()
    assert (home.stat().st_mode & 0o777, VARIABLE in os.environ) == (0o700, False)
    code, folder = open_code()
    assert names(folder) == ["ab/kernel.so"]
    assert (folder / "ab" / "kernel.so").read_bytes() == b"compiled"
    written = kept.stat().st_ino
    code.close()
    assert [kept.stat().st_ino, *home.iterdir()] == [written, kept], "nothing new: nothing is written"
    # As importing torch._dynamo does, also before the launch had a folder for temporary files.
    monkeypatch.setenv(VARIABLE, f"/elsewhere/{Path(default_cache_dir()).name}")
    code, folder = open_code("another recipe")
    assert (names(folder), folder.parent) == ([], home)
    code.close()


def test_a_start_that_was_killed_while_it_compiled_leaves_nothing_to_the_next(home, monkeypatch):
    monkeypatch.setattr(compiled_code, "unfinished", lambda path, kind: path.with_name(".k.zip.host+1+2+3.new"))
    _, folder = open_code()
    (folder / "half.so").write_bytes(b"half")
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(home.parents[2]))
    os.environ.pop(VARIABLE, None)
    os.utime(folder, (0, 0))  # another machine's: left alone for a day
    code, fresh = open_code()
    assert (names(fresh), folder.exists()) == ([], False)
    code.close()


@pytest.mark.parametrize("damage", [lambda data: data[:-40], lambda data: data[:9] + b"?" + data[10:], lambda _: b""])
def test_a_damaged_file_is_a_note_and_is_compiled_again(home, damage):
    keep(b"compiled")
    (kept,) = home.iterdir()
    kept.write_bytes(damage(kept.read_bytes()))
    code, folder = open_code()
    assert (names(folder), kept.exists()) == ([], False)
    assert "damaged" in code.notes[0]
    code.close()
    keep(b"again")
    code, folder = open_code()
    assert (folder / "ab" / "kernel.so").read_bytes() == b"again"
    code.close()


def test_a_folder_that_others_can_write_to_is_not_trusted(home):
    keep(b"theirs")
    home.chmod(0o777)
    code, folder = open_code()
    assert (names(folder), folder.parent == home) == ([], False)
    assert "only you can write to" in code.notes[0]
    code.close()
    assert not folder.exists()


def test_a_full_disk_fails_nothing(small_disk, monkeypatch):
    monkeypatch.setenv("HOME", str(small_disk))
    monkeypatch.delenv(VARIABLE, raising=False)
    code, folder = open_code()
    (folder / "kernel.so").write_bytes(b"x" * 40_000)
    code.close()
    assert names(small_disk) == []


def test_the_least_recently_used_files_make_room(home, monkeypatch):
    for age, recipe in enumerate("abc"):
        keep(bytes(1000), recipe)
        newest = max(home.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (1000 + age, 1000 + age))
    size = newest.stat().st_size
    open_code("a")[0].close()  # used: now the newest
    monkeypatch.setattr(compiled_code, "MOST_BYTES", 2 * size)
    keep(bytes(1000), "d")
    found = {}
    for recipe in "abcd":
        code, folder = open_code(recipe)
        found[recipe] = names(folder) != []
        code.close()
    assert found == {"a": True, "b": False, "c": False, "d": True}


def test_a_folder_of_the_users_own_is_left_to_pytorch(home, monkeypatch):
    monkeypatch.setenv(VARIABLE, "/mine")
    code = CompiledCode("recipe", ALONE)
    code.keep()
    code.close()
    assert (os.environ[VARIABLE], home.exists()) == ("/mine", False)


def test_python_3_11_2_finds_it_too(home, monkeypatch):
    """Debian 12 has it, without the `filter` of tarfile that came with 3.11.4: what unpacks without it is not safe."""

    def of_3_11_2(self, path=".", members=None, *, numeric_owner=False):
        raise AssertionError("unpacks without a filter")

    monkeypatch.setattr(tarfile.TarFile, "extractall", of_3_11_2)
    keep(b"compiled")
    code, folder = open_code()
    assert names(folder) == ["ab/kernel.so"]
    code.close()


@pytest.mark.slow
def test_pytorch_compiles_once_for_two_starts(home):
    """The real thing: the second start takes graph and library from the file and gives the same bits."""
    images, results, misses = torch.linspace(-2, 2, 64).view(4, 16), [], []
    for _ in range(2):
        torch.compiler.reset()
        torch._inductor.utils.clear_caches()
        counters.clear()
        code, folder = open_code()
        network = nn.GELU()
        network.compile()
        results.append(network(images))
        libraries = [name for name in names(folder) if name.endswith(".so")]
        misses.append((counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]))
        code.close()
    assert misses == [(1, 0), (0, 1)]
    assert libraries
    assert torch.equal(*results)
