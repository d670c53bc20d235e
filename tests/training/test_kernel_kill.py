"""Memory that the kernel does not give: it kills a rank, in a control group with a real limit."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.training.commands import assert_success, read_metrics, run_command
from zerovision.training.base.errors import OUT_OF_MEMORY_EXIT_CODE

pytestmark = pytest.mark.slow

GROUPS = Path("/sys/fs/cgroup")
LIMITS = {"memory": "memory.limit_in_bytes", "": "memory.max"}  # of version 1 and of version 2
LIMIT_BYTES = 1_500_000_000


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with less memory than the training wants; skipped if this user may not make one."""
    for controller, limit in LIMITS.items():
        folder = GROUPS / controller / f"zerovision-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(LIMIT_BYTES))
        except OSError:  # no memory controller in this hierarchy
            folder.rmdir()
            continue
        yield folder
        while (folder / "cgroup.procs").read_text():
            time.sleep(0.1)
        folder.rmdir()
        return
    pytest.skip("needs a writable control group with a memory limit")


@pytest.fixture
def starter_goes_first(group: Path) -> Iterator[None]:
    """Make the starter of the ranks, once it has forked them, what the kernel kills first."""
    done = threading.Event()

    def mark() -> None:
        while not done.wait(0.05):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(psutil.Error, OSError):
                    process = psutil.Process(int(pid))
                    starters = [of for of in (process, process.parent()) if "local_ranks.py" in " ".join(of.cmdline())]
                    if starters == [process] and process.children():  # a rank, its child, has its command line
                        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")

    thread = threading.Thread(target=mark)
    thread.start()
    yield
    done.set()
    thread.join()


def test_the_starter_of_the_ranks_counts_too(group, starter_goes_first, tmp_path):
    result = assert_success(launch_in(group, tmp_path, "adapt"))
    said = "the launcher was ended by SIGKILL, the kernel's, because memory ran out: starting again with --batch-size="
    assert said in result.stderr
    assert read_metrics(tmp_path / "runs/run", "epoch")


def launch_in(group, tmp_path, on_oom):
    enter = f'echo $$ > {group}/cgroup.procs; exec bash scripts/launch_distributed.sh "$@"'
    words = ["basic_cnn", "ddp", "2", "500", "1", "--data", "fake", "--image-size", "64", "--on-oom", on_oom]
    logs = ["--log-dir", str(tmp_path), "--run-name", "run", "--tensorboard", "false", "--report", "false"]
    return run_command("bash", "-c", enter, "launch", *words, *logs, OMP_NUM_THREADS="1")


@pytest.mark.parametrize(("on_oom", "code"), [("adapt", 0), ("stop", OUT_OF_MEMORY_EXIT_CODE)])
def test_a_rank_that_the_kernel_kills_for_want_of_memory_takes_the_run_down_the_ladder(group, tmp_path, on_oom, code):
    result = launch_in(group, tmp_path, on_oom)
    assert result.returncode == code, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if "because memory ran out" in line]
    assert "SIGKILL, the kernel's, because memory ran out" in lines[0]
    if on_oom == "adapt":
        assert ": starting again with --batch-size=250 --gradient-accumulation-steps=2: " in lines[0]
        assert read_metrics(tmp_path / "runs/run", "epoch")
    else:
        assert "; next to try: --batch-size=250" in lines[0]
        assert len(lines) == 1
