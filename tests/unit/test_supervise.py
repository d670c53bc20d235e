"""What ranks really get through the launcher: words, signals, restarts, no orphans."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from torch.utils.file_baton import FileBaton

from tests.kit import wait_until
from tests.unit.launching import CORES, WORDS, environment, hear_ctrl_c, stub_repo
from zerovision.launch import node_run
from zerovision.launch.node_launcher import NodeLauncher
from zerovision.launch.node_run import FINAL_CODES, NodeRun
from zerovision.launch.process_tree import (
    MARK,
    HeartbeatFolder,
    LaunchProcesses,
    code_of_zombie,
    is_alive,
    remove_stale_build_locks,
)
from zerovision.launch.rank_monitor import Death, RankMonitor, main_thread
from zerovision.launch.restart_policy import RestartPolicy, signal_within
from zerovision.training.engines.deepspeed.engine import _sign_build_locks
from zerovision.training.world.machine import free_port

NO_RESTART = ("--max-restarts", "0")
END_SECONDS = 120  # for an end that takes a few seconds on a machine with nothing else to do


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """The root of a repository with the stub entry."""
    return stub_repo(tmp_path)


@pytest.fixture
def start(repo: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start the launcher on the stub; at the end of the test no process and no temporary folder of it may be left."""
    started: list[subprocess.Popen] = []
    (tmp_path / "torch_extensions").mkdir()
    temporary = Path(tempfile.mkdtemp(prefix="zv-", dir="/tmp"))  # short: sockets lie in it

    def start_launcher(*extra: str) -> subprocess.Popen:
        process = subprocess.Popen(
            ["bash", str(repo / "scripts" / "launch_distributed.sh"), *WORDS["launch_distributed.sh"], *extra],
            env=environment(
                STUB_FOLDER=str(tmp_path),
                TORCH_EXTENSIONS_DIR=str(tmp_path / "torch_extensions"),
                TMPDIR=str(temporary),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=hear_ctrl_c,
        )
        started.append(process)
        return process

    yield start_launcher
    left = processes_of(repo)
    for process in started:
        process.kill()
        process.wait()
    for process in processes_of(repo):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    files_left = list(temporary.iterdir())
    shutil.rmtree(temporary)
    assert left == []
    assert files_left == []


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


def records(folder: Path, restart: int = 0) -> list[dict]:
    """Return what the ranks of one start said of themselves; an empty list where it did not happen."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"rank*-{restart}.json"))]


def signals(folder: Path) -> list[int]:
    """Return the first signal that each rank of the first start got."""
    return [rank["received"][0][0] for rank in records(folder)]


def output_and_code(process: subprocess.Popen) -> tuple[list[str], int]:
    output, _ = process.communicate(timeout=END_SECONDS)
    return [line for line in output.splitlines() if "no GPU found" not in line], process.returncode


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGUSR1, signal.SIGTERM))]
)
def test_a_signal_reaches_all_ranks_at_once(start, tmp_path: Path, number: int) -> None:
    nasty = "a b;$(exit 3)\n`"
    process = start("--data", nasty)
    wait_until(lambda: len(records(tmp_path)) == 2)
    process.send_signal(number)
    lines, code = output_and_code(process)
    assert code == 128 + number
    ranks = records(tmp_path)
    moments = [rank["received"][0][1] for rank in ranks]
    assert signals(tmp_path) == [number, number]
    assert max(moments) - min(moments) < 1.0
    assert all(rank["argv"][-2:] == ["--data", nasty] for rank in ranks)
    assert all(rank["threads"] == str(max(1, CORES // 2)) for rank in ranks)
    assert len(lines) == 1, lines  # that they stop: no launcher's chatter


def test_a_killed_rank_is_restarted_once_and_the_run_goes_on(start, tmp_path: Path) -> None:
    process = start("--fault", "kill")
    lines, code = output_and_code(process)
    assert code == 0, lines
    first, second = records(tmp_path), records(tmp_path, 1)
    assert lines[-1].endswith(f", pid {first[1]['pid']}) was ended by SIGKILL: restart 1 of 3"), lines
    assert [rank["argv"][-1] for rank in second] == ["--run-name=run-7"] * 2
    assert [rank["received"] for rank in second] == [[], []]  # also none because of a launcher that is well
    assert first[0]["port"] != second[0]["port"] == second[1]["port"]
    assert first[0]["ppid"] == second[0]["ppid"]  # which has imported all there is
    assert first[0]["run_id"] == first[1]["run_id"] != second[0]["run_id"] == second[1]["run_id"]


def test_a_dead_rank_ends_one_that_waits_for_it(start, tmp_path: Path) -> None:
    """SIGTERM only sets a flag."""
    process = start("--fault", "kill", "--deaf", *NO_RESTART)
    lines, code = output_and_code(process)
    assert time.time() - records(tmp_path)[1]["time"] < 10.0
    assert code == 128 + signal.SIGKILL
    assert lines[-1].endswith("was ended by SIGKILL: gave up after 0 restarts without progress"), lines


def test_a_new_checkpoint_starts_the_count_anew_and_a_given_port_stays(start, tmp_path: Path) -> None:
    port = str(free_port())
    process = start("--fault", "kill", "--always", "--save", "--save", "--max-restarts=1", "--master-port", port)
    lines, code = output_and_code(process)
    assert code == 128 + signal.SIGKILL
    ends = [line.rsplit(": ", 1)[1] for line in lines]
    assert ends == ["restart 1 of 1", "restart 1 of 1", "gave up after 1 restart without progress"]
    ports = [[rank["port"] for rank in records(tmp_path, restart)] for restart in range(4)]
    assert ports == [[port] * 2] * 3 + [[]]


@pytest.mark.parametrize("fault", ["2", *(pytest.param(code, marks=pytest.mark.slow) for code in ("65", "74"))])
def test_what_a_restart_cannot_mend_is_not_restarted(start, tmp_path: Path, fault: str) -> None:
    lines, code = output_and_code(start("--fault", fault))
    assert code == int(fault)
    assert lines == []  # the ranks speak for themselves
    assert not records(tmp_path, 1)


def test_sigterm_of_one_rank_is_a_wish_to_stop(start, tmp_path: Path) -> None:
    process = start()
    wait_until(lambda: len(records(tmp_path)) == 2)
    psutil.Process(records(tmp_path)[1]["pid"]).terminate()
    lines, code = output_and_code(process)
    assert (lines, code) == ([], 128 + signal.SIGTERM)
    assert not records(tmp_path, 1)


def test_exit_code_0_without_the_success_marker_is_a_failure(start) -> None:
    lines, code = output_and_code(start("--fault", "silent", *NO_RESTART))
    assert code == 1
    assert "rank 0 did not report that training is done: gave up" in lines[-1]


@pytest.mark.parametrize("fault", [pytest.param("stop", marks=pytest.mark.slow), "sleep"])
def test_a_hang_is_named_with_its_stack_and_restarted(start, tmp_path: Path, fault: str) -> None:
    process = start("--fault", fault)
    wait_until(lambda: len(records(tmp_path)) == 2)
    begin = time.monotonic()
    wait_until(lambda: len(records(tmp_path, 1)) == 2)
    assert time.monotonic() - begin < 30.0  # 3 s without a beat, 2 s for stacks, and a new start
    lines, code = output_and_code(process)
    assert code == 0, lines
    text = "\n".join(lines)
    pid = records(tmp_path)[1]["pid"]
    found = re.search(
        rf"rank 1 \(\S+, pid {pid}\) hangs: .* for (\d+) s \(3 s allowed\) in phase 'train', step 5; ", text
    )
    assert found, text
    assert 3 <= int(found[1]) <= 8
    inner, outer = ("sleep_for_ever", "train") if fault == "sleep" else ("train", "<module>")
    assert re.search(rf'File ".*train_distributed.py", line \d+ in {inner}\n  File .* in {outer}\n', text), text
    assert ("process stopped" in text) == (fault == "stop")
    assert re.search(r"rank [01] hung: restart 1 of 3", lines[-1])
    assert records(tmp_path)[0]["ppid"] == records(tmp_path, 1)[0]["ppid"]
    if fault == "stop":
        assert "rank 0" not in text  # it went on
    else:
        assert "it probably waits for rank" in text


def test_a_killed_node_launcher_stops_the_ranks_and_is_restarted(start, tmp_path: Path) -> None:
    process = start()
    wait_until(lambda: len(records(tmp_path)) == 2)
    psutil.Process(records(tmp_path)[0]["ppid"]).kill()
    lines, code = output_and_code(process)
    assert code == 0, lines
    assert "the launcher " in lines[-1]
    assert lines[-1].endswith(": restart 1 of 3"), lines
    assert signals(tmp_path) == [signal.SIGTERM] * 2
    assert len(records(tmp_path, 1)) == 2


def test_a_launcher_that_starts_no_rank_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(node_run, "NO_RANK_SECONDS", 0.5)
    launch = LaunchProcesses()
    with contextlib.closing(NodeLauncher()) as launcher:
        run = NodeRun(launch, launcher, HeartbeatFolder(tmp_path), [], stop_timeout_s=1.0)
        ending = run.run(["sleep", "60"], environment(**{MARK: launch.mark}))
    assert (ending.code, ending.is_final) == (node_run.HANG_CODE, False)
    assert launch.processes() == []


def test_kill_9_of_the_supervisor_still_stops_the_ranks(start, repo: Path, tmp_path: Path) -> None:
    process = start()
    wait_until(lambda: len(records(tmp_path)) == 2)
    process.kill()
    wait_until(lambda: processes_of(repo) == [])
    assert signals(tmp_path) == [signal.SIGTERM] * 2


def test_kill_9_of_all_leaves_files_only_until_the_next_start(start, repo: Path, tmp_path: Path) -> None:
    start()
    wait_until(lambda: len(records(tmp_path)) == 2)
    while found := processes_of(repo):
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    for left in (*tmp_path.glob("rank*-0.json"), *tmp_path.glob("stop-0")):  # a rank may have stopped before its kill
        left.unlink()
    lines, code = output_and_code(start("--fault", "finish"))
    assert (lines, code) == ([], 0)  # and the fixture finds nothing left


def test_a_signal_during_start_up_ends_everything(start, repo: Path) -> None:
    process = start()
    wait_until(lambda: any("local_ranks.py" in word for one in processes_of(repo) for word in command_line(one)))
    process.send_signal(signal.SIGTERM)
    assert output_and_code(process)[1] == 128 + signal.SIGTERM


def test_a_signal_between_two_starts_ends_the_waiting() -> None:
    begin = time.monotonic()
    assert signal_within(0.2, []) == 0
    assert time.monotonic() - begin >= 0.2
    received: list[int] = []
    threading.Timer(0.2, received.append, [signal.SIGHUP]).start()
    assert signal_within(30.0, received) == signal.SIGTERM
    assert time.monotonic() - begin < 20.0


def test_the_delay_doubles_up_to_30_seconds_and_progress_resets_it(capsys: pytest.CaptureFixture) -> None:
    restarts = RestartPolicy(allowed=7)
    assert [restarts.after_failure("why", -1) for _ in range(7)] == [0.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert capsys.readouterr().err.splitlines()[:2] == ["why: restart 1 of 7", "why: restart 2 of 7 in 2 s"]
    assert restarts.after_failure("why", 40) == 0.0
    assert [restarts.after_failure("why", 40) for _ in range(7)] == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]
    assert restarts.total == 14


@pytest.mark.parametrize(
    ("code", "noted", "expected"),
    [
        *[(0, True, False), (143, True, False), (143, False, False), (65, True, False), (74, True, False)],
        *[
            (0, False, True),
            (1, True, True),
            (2, True, True),
            (71, True, True),
            (-9, False, True),
            (-15, False, True),
            (None, False, True),
        ],
    ],
)
def test_only_an_end_on_which_all_agree_gives_the_others_time(code: int | None, noted: bool, expected: bool) -> None:
    assert Death(1, "node-1, pid 7", code, noted, 0.0).is_failure == expected


def test_a_rank_without_memory_is_the_failure_even_if_another_ended_before_it(tmp_path: Path) -> None:
    monitor = RankMonitor(NodeLauncher(), HeartbeatFolder(tmp_path))
    monitor.deaths = [Death(rank, "", code, True, 0.0) for rank, code in enumerate([143, 1, 71, 1, 71])]
    assert monitor.first_failure() == monitor.deaths[2]
    del monitor.deaths[2:]
    assert monitor.first_failure() == monitor.deaths[1]


def test_the_stack_is_the_main_threads_and_our_own_frames_stay() -> None:
    ours = [f'  File "/repo/training/run.py", line {n} in train' for n in range(3)]
    library = [f'  File "/env/site-packages/torch/nn.py", line {n} in call' for n in range(40)]
    other = 'Thread 0x1 (most recent call first):\n  File "/usr/threading.py", line 1 in wait\n\n'
    dump = "\n".join([other + "Current thread 0x2 (most recent call first):", *library, *ours, ""])
    assert main_thread(dump) == library[:7] + ours
    imports = [f'  File "<frozen importlib._bootstrap>", line {n} in _find_and_load' for n in range(4)]
    imports.append('  File "/usr/lib/python3.11/importlib/__init__.py", line 126 in import_module')
    deep = [line for frame in [*library[:3], *ours] for line in (frame, *imports)]
    assert main_thread("\n".join(["Current thread 0x2 (most recent call first):", *deep])) == library[:3] + ours
    assert main_thread(other) == ['  File "/usr/threading.py", line 1 in wait']
    assert main_thread("") == []


def test_final_codes() -> None:
    assert set(FINAL_CODES) == {2, 65, 70, 71, 74, 78, 130, 138, 143}


@pytest.mark.parametrize(("how", "expected"), [("exit 7", 7), ("kill -9 $$", -9), ("kill -TERM $$", -15)])
def test_a_zombie_still_tells_how_it_ended(how: str, expected: int) -> None:
    process = subprocess.Popen(["bash", "-c", how])
    wait_until(lambda: not is_alive(psutil.Process(process.pid)))
    assert code_of_zombie(process.pid) == expected
    assert process.wait() == expected
    assert code_of_zombie(process.pid) is None


def test_stale_build_locks_go_and_held_ones_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that are held where we cannot see: on another machine, or by another user."""
    _sign_build_locks()
    batons = {}
    for name in ("held", "stale", "elsewhere", "of-others", "old"):
        (tmp_path / name).mkdir()
        batons[name] = FileBaton(str(tmp_path / name / "lock"))
        assert batons[name].try_acquire()
        assert not batons[name].try_acquire()
        if name != "held":
            os.close(batons[name].fd)
    (tmp_path / "elsewhere/lock").write_text("node-2 pid:[4026531836]")
    for name in ("of-others", "old"):  # made by another program, which signs nothing
        (tmp_path / name / "lock").write_text("")
    os.utime(tmp_path / "old/lock", (0, 0))
    remove_stale_build_locks(tmp_path)
    assert sorted(path.parent.name for path in tmp_path.glob("*/lock")) == ["elsewhere", "held", "of-others"]
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r".*/(.*)/lock .*", r"\1", line) for line in lines] == ["elsewhere", "of-others"]
    batons["held"].release()
