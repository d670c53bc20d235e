"""Heartbeats, written and read, also torn, missing or on a full disk; and the death of a rank's parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.kit import wait_until
from tests.unit.launching import REPO_ROOT
from zerovision.launch.process_tree import HeartbeatFolder
from zerovision.training.base.files import unfinished
from zerovision.training.base.heartbeat import ENDED, RECORD_BYTES, Heartbeat, HeartbeatWriter, beat_of


def run_python(code: str, *arguments: object) -> subprocess.Popen:
    words = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(words, cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True)


def test_the_last_beat_is_read_back(tmp_path: Path) -> None:
    writer, folder = HeartbeatWriter(tmp_path, 3, 300.0), HeartbeatFolder(tmp_path)
    assert folder.beats() == {}
    writer.beat("a long phase " * 20, step=123456789, allowed_s=900.0)
    before = time.time(), time.monotonic()
    writer.beat("train", step=7)
    beat = folder.beats()[3]
    assert (beat.rank, beat.pid, beat.host) == (3, os.getpid(), os.uname().nodename)
    assert (beat.phase, beat.step, beat.allowed_s, beat.exit_code) == ("train", 7, 300.0, None)
    assert before[0] <= beat.time <= time.time()
    assert before[1] <= beat.monotonic <= time.monotonic()
    writer.ended(143)
    assert (folder.beats()[3].phase, folder.beats()[3].exit_code) == (ENDED, 143)
    assert (tmp_path / "rank-3.json").stat().st_size == RECORD_BYTES


def test_a_torn_record_is_never_believed() -> None:
    old = Heartbeat(0, "node-1", 4711, "train", 199, 1.7e9, 19999.5, 300.0)
    new = Heartbeat(0, "node-1", 4711, "evaluate", 200, 1.7e9 + 10.0, 20000.5, 900.0)
    read = [beat_of(new.record()[:cut] + old.record()[cut:]) for cut in range(RECORD_BYTES + 1)]
    assert (read[0], read[-1]) == (old, new)
    assert set(read) == {old, new, None}
    assert {beat_of(old.record()[:cut]) for cut in range(RECORD_BYTES)} == {None}


def test_a_reader_beside_a_writer_sees_whole_beats_in_order(tmp_path: Path) -> None:
    writer = run_python(
        """
        import sys
        from pathlib import Path
        from zerovision.training.base.heartbeat import HeartbeatWriter
        writer = HeartbeatWriter(Path(sys.argv[1]), 0, 300.0)
        for step in range(20000):
            writer.beat("train" if step % 3 else "evaluate with a longer name", step)
        """,
        tmp_path,
    )
    steps = []
    while writer.poll() is None:
        steps += [beat.step for beat in HeartbeatFolder(tmp_path).beats().values()]
    assert steps == sorted(steps)
    assert len(set(steps)) > 10
    assert HeartbeatFolder(tmp_path).beats()[0].step == 19999


def test_a_beat_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent at every step: no file is opened, renamed or flushed to the disk for it."""
    writer, calls = HeartbeatWriter(tmp_path, 0, 300.0), []
    for name in ("open", "pwrite", "write", "replace", "rename", "unlink", "fsync", "fdatasync"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, call=call: calls.append(name) or call(*given))
    monkeypatch.setattr("builtins.open", lambda *given, **more: calls.append("open"))
    for step in range(5):
        writer.beat("train", step)
    assert calls == ["pwrite"] * 5


def test_what_rank_0_says_and_a_new_start(tmp_path: Path) -> None:
    writer, folder = HeartbeatWriter(tmp_path, 0, 300.0), HeartbeatFolder(tmp_path)
    assert (folder.run_name(), folder.checkpoint_position(), folder.has_succeeded()) == ("", -1, False)
    writer.run_name("run 7 ü")
    writer.checkpoint_saved(0)
    writer.checkpoint_saved(1200)
    writer.succeeded()
    assert (folder.run_name(), folder.checkpoint_position(), folder.has_succeeded()) == ("run 7 ü", 1200, True)
    folder.clear()
    assert list(tmp_path.iterdir()) == []
    assert (folder.run_name(), folder.checkpoint_position(), folder.has_succeeded()) == ("", -1, False)


@pytest.mark.parametrize("folder", [None, Path("/proc/nothing/here")], ids=["no launcher", "folder gone"])
def test_without_a_folder_nothing_happens(folder: Path | None) -> None:
    handler = signal.getsignal(signal.SIGUSR2)
    writer = HeartbeatWriter(folder, 0, 300.0)
    writer.watch_stacks()
    writer.beat("train", 1)
    writer.run_name("run")
    writer.checkpoint_saved(1)
    writer.ended(0)
    writer.ended(0)
    assert signal.getsignal(signal.SIGUSR2) == handler


def test_a_rank_on_a_full_disk_lives_on_and_is_not_watched(tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").symlink_to("/dev/full")
    unfinished(tmp_path / "run-name", "tmp").symlink_to("/dev/full")
    writer = HeartbeatWriter(tmp_path, 0, 300.0)
    writer.beat("train", 1)
    writer.beat("train", 2)
    writer.run_name("run")
    writer.ended(0)
    folder = HeartbeatFolder(tmp_path)
    assert (folder.beats(), folder.run_name()) == ({}, "")
    assert not (tmp_path / "rank-0.json").is_symlink()  # nothing that would grow old and look like a hang


def test_sigusr2_gives_the_stack_of_code_that_is_stuck(tmp_path: Path) -> None:
    stuck = run_python(
        """
        import sys, threading
        from pathlib import Path
        from zerovision.training.base.heartbeat import HeartbeatWriter
        writer = HeartbeatWriter(Path(sys.argv[1]), 1, 300.0)
        assert writer.beat("start") is None
        def stuck_in_c():
            lock = threading.Lock()
            lock.acquire()
            writer.watch_stacks()
            lock.acquire()
        stuck_in_c()
        """,
        tmp_path,
    )
    folder = HeartbeatFolder(tmp_path)
    try:
        wait_until(lambda: folder.stack(1) is not None)
        time.sleep(0.2)
        stuck.send_signal(signal.SIGUSR2)
        wait_until(lambda: " in stuck_in_c\n" in (folder.stack(1) or ""))
        assert stuck.poll() is None
    finally:
        stuck.kill()
        stuck.wait()
    assert folder.stack(0) is None


CHILD = """
import os, signal, sys, time
from pathlib import Path
from zerovision.training.base.heartbeat import end_with_parent
folder = Path(sys.argv[1])
def remember(number, frame):
    (folder / "signal").write_text(str(number))
    os._exit(0)
signal.signal(signal.SIGTERM, remember)
sys.argv[0] = sys.argv[2] if len(sys.argv) > 2 else "train.py"
end_with_parent()
(folder / "pid").write_text(str(os.getpid()))
time.sleep(60)
"""
PARENT = """
import subprocess, sys, threading, time
subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
threading.Thread(target=time.sleep, args=(0.1,)).start()  # the end of another thread of the parent is not its end
time.sleep(60)
"""


def test_the_end_of_the_parent_is_heard_and_only_that(tmp_path: Path) -> None:
    parent = run_python(PARENT, tmp_path, CHILD)
    wait_until((tmp_path / "pid").exists)
    time.sleep(0.5)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    assert child.is_running()
    assert not (tmp_path / "signal").exists()
    parent.kill()
    wait_until((tmp_path / "signal").exists)
    parent.wait()


@pytest.mark.parametrize(
    ("given", "started_by_process_1", "has_parent"),
    [("", False, False), ("", True, True), ("1", False, True), ("2", True, False)],
)
def test_a_parent_that_was_gone_before_is_noticed(
    tmp_path: Path, given: str, started_by_process_1: bool, has_parent: bool
) -> None:
    """Process 1 is where orphans go, and in a container may be the launcher itself, or a script that starts one."""
    script = Path("/proc/1/cmdline").read_text().split("\0")[0] if started_by_process_1 else "nothing-like-this.py"
    code = CHILD.replace("end_with_parent()", f"end_with_parent({given})")
    child = run_python(f"import os\nos.getppid = lambda: 1\n{code}", tmp_path, script)
    wait_until(lambda: child.poll() is not None or (tmp_path / "pid").exists())
    assert (tmp_path / "pid").exists() == has_parent
    assert (tmp_path / "signal").exists() != has_parent
    child.kill()
    child.wait()
