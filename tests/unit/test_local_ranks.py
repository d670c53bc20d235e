"""The program that starts the ranks directly: what they are told, and how it ends when one of them does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import local_ranks
from tests.unit.launching import LAUNCH, REPO_ROOT, environment

TELL = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
open(sys.argv[1] + os.environ["RANK"], "w").write(json.dumps([[os.environ[n] for n in names], sys.argv[2:]]))
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


def command(program: Path, *arguments: str) -> list[str]:
    words = ["--nproc_per_node", "3", "--master_port", "29555", str(program), *arguments]
    return [sys.executable, str(LAUNCH / "local_ranks.py"), *words]


def write(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def start(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_every_rank_knows_its_place_and_gets_the_words(tmp_path: Path) -> None:
    words = ["--data", "a b;$(exit 3)\n`", "--nproc_per_node"]
    result = subprocess.run(command(write(tmp_path, TELL), f"{tmp_path}/rank", *words), timeout=30)
    assert result.returncode == 0
    for rank in range(3):
        place, given = json.loads((tmp_path / f"rank{rank}").read_text())
        assert place == [str(rank), str(rank), "3", "3", "127.0.0.1", "29555"]
        assert given == words


@pytest.mark.parametrize(("end", "code"), [("sys.exit(65)", 65), ("os.kill(os.getpid(), 9)", 137)])
def test_one_failure_ends_the_others_and_gives_the_code(tmp_path: Path, end: str, code: int) -> None:
    program = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {end}\ntime.sleep(60)"
    began = time.monotonic()
    assert subprocess.run(command(write(tmp_path, program)), timeout=50).returncode == code
    assert time.monotonic() - began < 30.0


def test_a_rank_that_is_deaf_to_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "END_SECONDS", 0.3)
    ranks = [start(DEAF), start(DEAF), start("raise SystemExit(3)")]
    try:
        assert [rank.stdout.readline() for rank in ranks[:2]] == ["deaf\n"] * 2
        assert local_ranks.wait_for_all(ranks) == 3
        assert [rank.wait() for rank in ranks] == [-signal.SIGKILL, -signal.SIGKILL, 3]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_signal_goes_to_every_rank(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    program = "import os, sys, time; open(f'{sys.argv[1]}/{os.getpid()}', 'w').close(); time.sleep(60)"
    launcher = subprocess.Popen(command(write(tmp_path, program), str(ready)))
    while len(list(ready.iterdir())) < 3:
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.terminate()
    assert launcher.wait(timeout=30) == 128 + signal.SIGTERM


def test_it_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; from launch import local_ranks; print('torch' in sys.modules, 'psutil' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, env=environment(), capture_output=True)
    assert result.stdout == b"False False\n", result.stderr
