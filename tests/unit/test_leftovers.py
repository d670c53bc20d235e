"""What a kill leaves unfinished goes with the next start; what a living process works on stays."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zerovision.launch.process_tree import MARK, make_temporary_folder, remove_abandoned
from zerovision.models.weights_metadata import Description, Preprocessing
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import (
    SECONDS_OF_OTHERS,
    remove_leftovers,
    replacing,
    replacing_folder,
    sync_to_disk,
    unfinished,
)
from zerovision.training.base.helper_processes import LONGEST_PLACE, socket_place
from zerovision.training.checkpoint.manifest import shard_name
from zerovision.training.checkpoint.shards import Snapshot, write_frozen, write_shard
from zerovision.training.checkpoint.weights import save_weights
from zerovision.training.config import TrainConfig
from zerovision.training.observe.new_run import Origin, create_run_folder, remove_leftovers_of_run

REPO_ROOT = Path(__file__).resolve().parents[2]
PREPARE = """
import os, signal, sys
from pathlib import Path
from zerovision.delivery.export.output_folder import unfinished_files
from zerovision.training.base.files import replacing_by_library, replacing_folder, replacing
folder = Path(sys.argv[1])
with (
    replacing(folder / "card.md") as card,
    replacing_by_library(folder / "model.safetensors") as weights,
    replacing_folder(folder / "evaluation") as new,
    unfinished_files(folder),
):
    card.touch()
    weights.with_name(".tmpAbC123").touch()  # safetensors' own unfinished file
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


@pytest.mark.parametrize("words", [pytest.param([], marks=pytest.mark.slow), ["between"]])
def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_stays(tmp_path: Path, busy, words):
    folder = tmp_path / "run"
    process = busy(folder, *words)
    before = sorted(path.name for path in folder.iterdir())
    assert len(before) == 5
    remove_leftovers(folder)
    assert sorted(path.name for path in folder.iterdir()) == before
    process.kill()
    process.wait()
    remove_leftovers(folder)
    assert [path.name for path in folder.iterdir()] == ["evaluation"]
    assert (folder / "evaluation" / "scores.json").exists()


def a_library(tensors, path: Path, metadata=None) -> None:
    """Write as the safetensors of a later day might."""
    (path.parent / ".part.7").touch(0o600)
    path.with_suffix(".safetensors.lock").touch(0o600)
    path.write_bytes(b"whole")
    path.chmod(0o600)


WRITERS = {
    "zerovision.training.checkpoint.weights": lambda path: save_weights(
        path,
        {"a": torch.zeros(2)},
        description=Description("basic_cnn", None, 2, 8),
        class_names=[],
        preprocessing=Preprocessing(8, None, (0.5,), (0.5,)),
    ),
    "zerovision.training.checkpoint.shards": lambda path: write_shard(path, Snapshot()),
    "zerovision.training.checkpoint.shards, frozen": lambda path: write_frozen(path, {"a": torch.zeros(2)}),
}


@pytest.mark.parametrize("library", [a_library, save_file], ids=["any", "safetensors"])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_whatever_the_library_does_files_follow_the_umask_and_nothing_lies_beside_them(
    tmp_path: Path, monkeypatch, umask, writer, library
):
    monkeypatch.setattr(f"{writer.partition(',')[0]}.save_file", library)
    path = tmp_path / "file.safetensors"
    before = os.umask(umask)
    try:
        WRITERS[writer](path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert os.listdir(tmp_path) == [path.name]


def test_only_these_modules_let_safetensors_write():
    files = [REPO_ROOT / (name.partition(",")[0].replace(".", "/") + ".py") for name in WRITERS]
    known = {str(file.resolve().relative_to(REPO_ROOT)) for file in files}
    rooms = ("models", "zerovision", "scripts")
    paths = [path for room in rooms for path in (REPO_ROOT / room).rglob("*.py")]
    found = {str(path.relative_to(REPO_ROOT)) for path in paths if re.search(r"import .*save_file", path.read_text())}
    assert found == known


def test_the_next_start_of_a_run_removes_what_a_dead_library_left_however_fresh(tmp_path: Path):
    run = tmp_path / "runs" / "digits"
    folders = [run, run / "export", run / "checkpoints", run / "checkpoints" / "step-00001-0000000"]
    left, written = ([folder / name for folder in folders] for name in (".tmpXyZ789", ".tmpAbC123"))
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    other = run / "checkpoints" / ".step-00002-0000000.tmp"
    other.mkdir()
    (other / shard_name(0)).touch()
    open_ones = [path.open("wb") for path in written]
    remove_leftovers(run)
    assert all(path.exists() for path in (*left, *written)), "in a folder that may be anybody's they stay"
    remove_leftovers_of_run(run)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in written), "a living process writes them"
    for file in open_ones:
        file.close()
    create_run_folder(TrainConfig(run_name="digits", log_dir=str(tmp_path)), Origin()).lock.close()
    assert not any(path.exists() for path in (*written, other))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EIO])
def test_a_file_system_that_syncs_no_folders_is_good_enough(tmp_path: Path, monkeypatch, number):
    def refuse(_descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    if number == errno.EIO:  # that is lost data
        with pytest.raises(OSError, match="Input/output"):
            sync_to_disk(tmp_path)
    else:
        with replacing(tmp_path / "last", durable=True) as temporary:
            temporary.write_text("step")
        assert (tmp_path / "last").read_text() == "step"


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


@pytest.mark.parametrize("name", ["n" * 255, "猫" * 85, "n" + "猫" * 84, "é" * 127, "n" * 9, "猫" * 50])
def test_files_and_folders_with_the_longest_names_are_replaced(tmp_path: Path, name):
    """A name has at most 255 bytes; a temporary name keeps as many whole characters as fit."""
    temporary = unfinished(tmp_path / name, "old").name
    kept = next((place for place, letter in enumerate(name) if temporary[1 + place] != letter), len(name))
    room = 255 - len(os.fsencode(temporary))
    assert room >= 0
    assert kept == len(name) or room < len(os.fsencode(name[kept]))
    with replacing(tmp_path / name) as made:
        made.write_text("new")
    assert (tmp_path / name).read_text() == "new"
    (tmp_path / name).unlink()
    for content in "ab":
        with replacing_folder(tmp_path / name) as folder:
            (folder / content).touch()
    assert [path.name for path in (tmp_path / name).iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_folder_of_a_launch_stays_while_its_maker_or_a_process_of_it_lives(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("zerovision.launch.process_tree.socket_place", lambda subfolder: str(tmp_path))
    code = "import sys, signal; from zerovision.launch.process_tree import make_temporary_folder as make; "
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


WORKERS = """
import os, shutil, sys, tempfile
from multiprocessing.connection import Listener
from multiprocessing.util import get_temp_dir
from zerovision.launch.process_tree import LaunchProcesses, launch_environment, make_temporary_folder
from zerovision.training.data import reader
reader._PRELOADED_MODULES = []  # which take seconds
if __name__ == "__main__":
    if "launched" in sys.argv:
        os.environ |= launch_environment(LaunchProcesses("m"), make_temporary_folder("m"), os.environ)
        tempfile.tempdir = None  # as in a process that is started with these
    worker = reader.worker_context().Process(target=print, args=("from a worker",))
    worker.start()
    worker.join()
    Listener(family="AF_UNIX").close()  # as for tensors between processes
    print(get_temp_dir())
    if "launched" in sys.argv:
        shutil.rmtree(os.environ["TMPDIR"])
"""


def test_a_place_leaves_room_for_the_names_of_sockets(monkeypatch):
    for length, subfolder, is_used in (
        (LONGEST_PLACE, "", True),
        (LONGEST_PLACE + 1, "", False),
        (LONGEST_PLACE - 5, "/long", True),
        (LONGEST_PLACE - 4, "/long", False),
    ):
        monkeypatch.setattr("tempfile.tempdir", "/" + "t" * (length - 1))
        assert (socket_place(subfolder) == tempfile.gettempdir()) is is_used
    monkeypatch.setattr("tempfile.tempdir", "/" + "t" * 120)
    monkeypatch.setattr("zerovision.training.base.helper_processes.OTHER_PLACES", ("/nowhere",))
    with pytest.raises(
        UserError, match=r"^no folder for temporary files \(/t+ is too long, at most 75 bytes\): set TMPDIR"
    ):
        socket_place()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "length", "is_used"), [("launched", 50, True), ("launched", 120, False), ("alone", 120, False)]
)
def test_workers_start_whatever_the_folders_are(start: str, length: int, is_used: bool, tmp_path: Path):
    """A TMPDIR that leaves no room for sockets is passed over; no module is imported from the current folder."""
    for name in ("random", "queue", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a foreign module')")
    program = tmp_path / "programs" / "workers.py"
    program.parent.mkdir()
    program.write_text(WORKERS)
    wanted = Path(tempfile.mkdtemp(prefix="t" * (length - len("/tmp/") - 8), dir="/tmp"))
    variables = os.environ | {"TMPDIR": str(wanted), "PYTHONPATH": str(REPO_ROOT)}
    try:
        command = [sys.executable, str(program), start]
        result = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
        assert (result.returncode, "foreign" in result.stderr) == (0, False), result.stderr
        said, folder = result.stdout.splitlines()
        assert said == "from a worker"
        assert Path(folder).is_relative_to(wanted) is is_used
        assert ("/tmp is used instead of TMPDIR" in result.stderr) is (start == "launched" and not is_used)
    finally:
        shutil.rmtree(wanted)
