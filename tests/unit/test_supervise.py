"""What ranks really get through the real deepspeed and torchrun launchers: words, signals, an end without orphans."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from scripts.supervise import remove_stale_build_locks, shell_exit_code
from tests.unit.launching import CORES, USER_ERROR, WORDS, environment, hear_ctrl_c, stub_repo


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """The root of a repository with the stub entry."""
    return stub_repo(tmp_path)


@pytest.fixture
def start(repo: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start the launcher on the stub; at the end of the test no process of it may be left."""
    started: list[subprocess.Popen] = []
    (tmp_path / "torch_extensions").mkdir()

    def start_launcher(launcher: str, *extra: str) -> subprocess.Popen:
        process = subprocess.Popen(
            ["bash", str(repo / "scripts" / "launch_distributed.sh"), *WORDS["launch_distributed.sh"], *extra],
            env=environment(
                LAUNCHER=launcher, STUB_FOLDER=str(tmp_path), TORCH_EXTENSIONS_DIR=str(tmp_path / "torch_extensions")
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=hear_ctrl_c,
        )
        started.append(process)
        return process

    yield start_launcher
    for process in started:
        process.kill()
    for process in processes_of(repo):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def processes_of(root: Path) -> list[psutil.Process]:
    """All live processes with a file of this repository on their command line."""
    found = []
    for process in psutil.process_iter():
        if any(word.startswith(str(root)) for word in command_line(process)):
            found.append(process)
    return found


def command_line(process: psutil.Process) -> list[str]:
    """Return the words of a process; none of one that has just ended."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def wait_until(condition: Callable[[], object], timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def records(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


@pytest.mark.parametrize(("launcher", "number"), [("deepspeed", signal.SIGTERM), ("torchrun", signal.SIGINT)])
def test_a_signal_reaches_all_ranks_at_once(start, repo: Path, tmp_path: Path, launcher: str, number: int) -> None:
    nasty = "a b;$(exit 3)\n`"
    process = start(launcher, "--data", nasty)
    wait_until(lambda: len(records(tmp_path)) == 2)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    ranks = records(tmp_path)
    moments = [rank["received"][0][1] for rank in ranks]
    assert [rank["received"][0][0] for rank in ranks] == [number, number]
    assert max(moments) - min(moments) < 1.0
    assert all(rank["argv"][-2:] == ["--data", nasty] for rank in ranks)
    assert all(rank["threads"] == str(max(1, CORES // 2)) for rank in ranks)
    assert len(output.splitlines()) == 2, output  # how many CPU ranks, and that they stop: no launcher's chatter
    assert processes_of(repo) == []


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_the_ranks_exit_code_is_passed_on_without_a_page(start, repo: Path, launcher: str) -> None:
    process = start(launcher, "--fail")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == USER_ERROR
    assert len(output.splitlines()) == 1, output
    assert processes_of(repo) == []


def test_a_killed_node_launcher_is_a_failure_and_leaves_no_rank(start, repo: Path, tmp_path: Path) -> None:
    process = start("deepspeed")
    wait_until(lambda: len(records(tmp_path)) == 2)
    psutil.Process(records(tmp_path)[0]["ppid"]).kill()  # deepspeed alone would exit with 0 and leave both ranks
    process.communicate(timeout=20)
    assert process.returncode not in (0, None)
    assert [rank["received"][0][0] for rank in records(tmp_path)] == [signal.SIGTERM] * 2
    assert processes_of(repo) == []


def test_kill_9_of_the_launcher_script_still_stops_the_ranks(start, repo: Path, tmp_path: Path) -> None:
    process = start("torchrun")
    wait_until(lambda: len(records(tmp_path)) == 2)
    process.kill()
    wait_until(lambda: processes_of(repo) == [])
    assert [rank["received"][0][0] for rank in records(tmp_path)] == [signal.SIGTERM] * 2


def test_a_rank_killed_with_9_is_reported_as_137(start, repo: Path, tmp_path: Path) -> None:
    process = start("torchrun")
    wait_until(lambda: len(records(tmp_path)) == 2)
    psutil.Process(records(tmp_path)[1]["pid"]).kill()
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL
    assert processes_of(repo) == []


def test_a_signal_during_start_up_ends_everything(start, repo: Path, tmp_path: Path) -> None:
    process = start("deepspeed")
    wait_until(lambda: any("deepspeed" in word for one in processes_of(repo) for word in command_line(one)[:2]))
    time.sleep(0.3)  # deepspeed imports torch for seconds; no rank is there yet
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert processes_of(repo) == []


def test_stale_build_locks_go_and_held_ones_stay(tmp_path: Path) -> None:
    held, stale = tmp_path / "cpu_adam" / "lock", tmp_path / "deepspeed_shm_comm" / "lock"
    for lock in (held, stale):
        lock.parent.mkdir()
        lock.touch()
    with held.open():
        remove_stale_build_locks(tmp_path)
        assert held.exists()
        assert not stale.exists()


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (2, 2), (-9, 137), (247, 137), (241, 143), (143, 143), (1, 1)])
def test_exit_codes_follow_the_shell(code: int, expected: int) -> None:
    assert shell_exit_code(code) == expected
