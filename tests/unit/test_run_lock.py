"""One training at a time in a run's folder: who is told what, and who may go on."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zerovision.training.base.errors import AnotherStartNeededError, UserError
from zerovision.training.config import TrainConfig
from zerovision.training.observe.new_run import LOCK, Origin, create_run_folder, lock_run

REPO_ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import os, sys
from pathlib import Path
from zerovision.training.observe.new_run import Origin, lock_run
held = lock_run(Path(sys.argv[1]), Origin.of(os.environ), wait_s=0)
print("held", flush=True)
sys.stdin.read()
"""
VARIABLES = ("ZEROVISION_LAUNCH", "ZEROVISION_RESTARTS", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
Hold = Callable[..., subprocess.Popen]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "digits"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def hold(run: Path, monkeypatch) -> Iterator[Hold]:
    """Let another process hold the run, in an environment with these variables."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    started = []

    def start(**variables: str) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD, str(run / LOCK)]
        process = subprocess.Popen(
            command, cwd=REPO_ROOT, env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        with process:  # closes its pipes, and waits
            pass


def test_a_second_training_is_told_who_holds_the_run_and_touches_nothing(run: Path, hold: Hold):
    holder = hold()
    before = (run / LOCK).read_bytes()
    with pytest.raises(UserError) as refusal:
        lock_run(run / LOCK, Origin(), wait_s=0.3)
    text = str(refusal.value)
    assert text.startswith(f"run 'digits' is being trained by pid {holder.pid} on {socket.gethostname()} since 20")
    assert text.endswith(f"If that machine is lost, remove {run / LOCK}.")
    assert "\n" not in text
    assert (run / LOCK).read_bytes() == before


def test_kill_9_gives_the_run_back_and_one_that_is_leaving_is_waited_for(run: Path, hold: Hold, capfd):
    killed = hold()
    killed.kill()
    killed.wait()
    leaving = hold()
    threading.Timer(0.5, leaving.stdin.close).start()
    with lock_run(run / LOCK, Origin(), wait_s=60.0):
        assert f'"pid": {os.getpid()},' in (run / LOCK).read_text()
    assert f"is held by pid {leaving.pid} on" in capfd.readouterr().err
    hold()


@pytest.mark.parametrize(
    ("earlier", "later", "is_taken"),
    [
        (("a-node01", "0", "", ""), ("a-node02", "1", "", ""), True),
        (("a", "3", "", ""), ("a", "4", "", ""), True),
        (("a", "1", "", ""), ("a", "1", "", ""), False),
        (("a", "0", "", ""), ("b", "1", "", ""), False),
        (("", "0", "", ""), ("", "1", "", ""), False),
        (("a", "0", "17", "0"), ("b", "0", "17", "1"), True),
        (("a", "2", "17", ""), ("b", "0", "17", "1"), True),
        (("a", "0", "17", "1"), ("b", "0", "17", "1"), False),
        (("a", "0", "17", "0"), ("b", "0", "18", "1"), False),
    ],
)
def test_a_later_start_of_the_same_launch_or_job_goes_on_without_a_lost_one(
    run: Path, hold: Hold, earlier, later, is_taken: bool
):
    """As if the file server kept the lock of a machine that is gone."""
    hold(**dict(zip(VARIABLES, earlier, strict=True)))
    origin = Origin.of(dict(zip(VARIABLES, later, strict=True)))
    if not is_taken:
        with pytest.raises(UserError, match="is being trained by pid"):
            lock_run(run / LOCK, origin, wait_s=0)
        return
    with lock_run(run / LOCK, origin, wait_s=0), pytest.raises(AssertionError):  # a third one is kept out by us
        hold()
    hold()


def test_a_lock_file_that_says_nothing_of_use(run: Path, hold: Hold):
    hold()
    for content in ("", "[]", "{}", '{"host": "a\\u001b[2Jb"}', "[" * 5000):
        (run / LOCK).write_text(content)
        with pytest.raises(UserError, match=r"^run 'digits' is being trained by another process\. "):
            lock_run(run / LOCK, Origin(), wait_s=0)


def test_a_file_system_without_locks_costs_a_note(run: Path, monkeypatch, capfd):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock_run(run / LOCK, Origin(), wait_s=0).close()
    assert "cannot be locked (No locks available)" in capfd.readouterr().err


@pytest.mark.parametrize(("owner", "name", "number"), [(Path, "rename", errno.ENOSYS), (os, "replace", errno.EPERM)])
def test_a_file_system_without_renames_is_refused_before_training(
    tmp_path: Path, run: Path, monkeypatch, owner, name, number
):
    """As of a bucket that is mounted: gcsfuse renames no folder with files in it, Mountpoint for S3 nothing."""

    def refuse(old, new):
        raise OSError(number, os.strerror(number), str(old), None, str(new))

    monkeypatch.setattr(owner, name, refuse)
    config = TrainConfig(run_name="digits", log_dir=str(tmp_path))
    with pytest.raises(
        UserError, match=rf"^--log-dir {tmp_path}: files cannot be renamed there \({os.strerror(number)}\)"
    ):
        create_run_folder(config, Origin())
    monkeypatch.undo()
    assert not list((run / "checkpoints").iterdir())
    create_run_folder(config, Origin()).lock.close()


@pytest.mark.parametrize(("restarts", "error"), [(0, UserError), (1, AnotherStartNeededError)])
def test_a_full_disk_refuses_a_new_run_and_lets_a_restart_be_tried_again(tmp_path, monkeypatch, restarts, error):
    def write(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("zerovision.training.observe.new_run._check_renames", write)
    config = TrainConfig(run_name="digits", log_dir=str(tmp_path))
    with pytest.raises(error, match=rf"^--log-dir {tmp_path}: cannot write there \(No space left on device\)[.;] "):
        create_run_folder(config, Origin("launch", restarts=restarts))


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_the_folder_of_a_run_is_held_until_the_lock_is_closed(tmp_path: Path, run: Path, hold: Hold, resume: str):
    config = TrainConfig(run_name="digits", log_dir=str(tmp_path), resume=resume)
    folder = create_run_folder(config, Origin())
    assert folder.path == run
    with pytest.raises(AssertionError):
        hold()
    folder.lock.close()
    hold()


def test_runs_of_one_second_whose_names_nobody_chose_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "20261126-120000")
    config = TrainConfig(model_type="timm:a/b", log_dir=str(tmp_path))
    created = [create_run_folder(config, Origin()) for _ in range(3)]
    name = "20261126-120000-timm-a-b-ddp"
    assert [folder.name for folder in created] == [name, f"{name}-2", f"{name}-3"]
    for folder in created:
        folder.lock.close()
    # A restart is told the name, and stays in its folder; a name that somebody chose is refused as before.
    named = TrainConfig(log_dir=str(tmp_path), run_name=f"{name}-2")
    again = create_run_folder(named, Origin("launch", restarts=1))
    assert again == created[1]
    again.lock.close()
    create_run_folder(named, Origin()).lock.close()  # none has come so far that it wrote a line
    again.metrics.write_text("{}\n")
    with pytest.raises(UserError, match="already contains a run"):
        create_run_folder(named, Origin())
