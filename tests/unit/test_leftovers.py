"""What a kill leaves unfinished goes with the next start; what a living process works on stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.process_tree import MARK
from launch.temporary_folder import LONGEST_PATH, make_temporary_folder, private_variables, remove_abandoned
from training.checkpoint.atomic_write import (
    SECONDS_OF_OTHERS,
    remove_leftovers,
    replacing,
    unfinished,
)

REPO_ROOT = Path(__file__).resolve().parents[2]
PREPARE = """
import os, signal, sys
from pathlib import Path
from delivery.export.output_folder import unfinished_files
from training.checkpoint.atomic_write import replacing_folder, replacing
folder = Path(sys.argv[1])
with (
    replacing(folder / "model.safetensors") as weights,
    replacing_folder(folder / "evaluation") as new,
    unfinished_files(folder),
):
    weights.touch()
    if len(sys.argv) > 2:  # killed between the two renames that replace a folder
        os.replace(folder / "evaluation", str(new)[:-3] + "old")
    print("ready", flush=True)
    signal.pause()
"""


@pytest.fixture
def busy(tmp_path: Path):
    """Start processes that are in the middle of writing weights, an evaluation and an export into a folder."""
    started = []

    def start(folder: Path, *words: str) -> subprocess.Popen:
        (folder / "evaluation").mkdir(parents=True)
        (folder / "evaluation" / "scores.json").write_text("{}")
        command = [sys.executable, "-c", PREPARE, str(folder), *words]
        started.append(subprocess.Popen(command, cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        with process:
            pass


@pytest.mark.parametrize("words", [[], ["between"]])
def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_stays(tmp_path: Path, busy, words):
    folder = tmp_path / "run"
    process = busy(folder, *words)
    before = sorted(path.name for path in folder.iterdir())
    assert len(before) == 4
    remove_leftovers(folder)
    assert sorted(path.name for path in folder.iterdir()) == before
    process.kill()
    process.wait()
    remove_leftovers(folder)
    assert [path.name for path in folder.iterdir()] == ["evaluation"]
    assert (folder / "evaluation" / "scores.json").exists()


def test_a_number_given_to_another_process_since_then_is_no_sign_of_life(tmp_path: Path):
    with replacing(tmp_path / "model.safetensors") as ours:
        ours.touch()
        place, pid, start = ours.name.removesuffix(".tmp").rsplit("+", 2)
        earlier = tmp_path / f"{place}+{pid}+{int(start) - 1}.tmp"
        earlier.touch()
        remove_leftovers(tmp_path)
        assert ours.exists()
        assert not earlier.exists()


@pytest.mark.parametrize(("age_s", "ours", "is_left"), [(60, (), True), (60, ("a",), False), (86500, (), False)])
def test_of_another_machine_only_what_is_old_or_can_only_be_ours(tmp_path: Path, age_s, ours, is_left):
    assert 60 < SECONDS_OF_OTHERS < 86500
    path = tmp_path / ".a.node02+4026531836+1+100.tmp"
    path.touch()
    os.utime(path, (time.time() - age_s,) * 2)
    remove_leftovers(tmp_path, ours)
    assert path.exists() == is_left


def test_other_files_stay(tmp_path: Path):
    names = [".a.tmp", ".last.tmp", ".step-00001-0000001.tmp", ".a.1234.tmp", "a.vm+1+1+1.tmp", ".lock", ".a.b.new"]
    for name in names:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path, ours=("a",))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    remove_leftovers(tmp_path / "nowhere")
    assert len(unfinished(tmp_path / ("n" * 250), "tmp").name.encode()) < 256


def test_the_folder_of_a_launch_stays_while_its_maker_or_a_process_of_it_lives(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import sys, signal; from launch.temporary_folder import make_temporary_folder as make; "
    code += "print(make('of-another').path, flush=True); signal.pause()"
    maker = subprocess.Popen([sys.executable, "-c", code], cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True)
    member = subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: "of-another"})
    stranger = tmp_path / "zerovision-without-owner"
    stranger.mkdir()
    with maker, member:
        folder = Path(maker.stdout.readline().strip())
        (folder / "pymp-1").mkdir()
        for process in (maker, member):
            remove_abandoned(tmp_path)
            assert folder.exists()
            process.send_signal(signal.SIGKILL)
            process.wait()
    ours = make_temporary_folder("ours").path
    remove_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == {ours, stranger}


def test_a_folder_whose_name_is_too_long_for_sockets_is_not_forced_on_the_ranks(tmp_path: Path):
    given = {"TORCH_EXTENSIONS_DIR": "/extensions"}
    short, long = Path("/" + "s" * (LONGEST_PATH - 1)), Path("/" + "s" * LONGEST_PATH)
    assert private_variables(short, given)["TMPDIR"] == str(short)
    assert "TMPDIR" not in private_variables(long, given)
    assert private_variables(short, given)["TORCH_EXTENSIONS_DIR"] == "/extensions"
