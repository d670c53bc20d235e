"""The program that starts the ranks directly: what they are told, and how it ends when one of them does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.unit.launching import LAUNCH, environment
from zerovision.launch.node_launcher import NodeLauncher, local_ranks_command

TELL = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
open(sys.argv[1] + os.environ["RANK"], "w").write(json.dumps([[os.environ[n] for n in names], sys.argv[2:]]))
"""
# What a rank sees of itself and of what was imported for it.
LOOK = """
import json, os, sys
import ahead, psutil
seen = psutil.Process()
place = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MARK")}
torch = sys.modules.get("torch")
told = dict(place=place, words=sys.argv, name=seen.name(), parent=os.getppid(), importer=ahead.PID,
    main=sys.modules["__main__"].__file__, path=sys.path[0], secret=os.environ["SECRET"], torch=torch is not None,
    threads=len(os.listdir(f"/proc/{os.getppid()}/task")), spoilt=torch is not None and torch.cuda._is_in_bad_fork())
open(sys.argv[1] + os.environ["RANK"], "w").write(json.dumps(told))
"""


def command(program: Path, *arguments: str) -> list[str]:
    words = ["--nproc_per_node", "3", "--master_port", "29555", str(program), *arguments]
    return [sys.executable, str(LAUNCH / "local_ranks.py"), *words]


def write(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def test_every_rank_knows_its_place_and_gets_the_words(tmp_path: Path) -> None:
    words = ["--data", "a b;$(exit 3)\n`", "--nproc_per_node"]
    result = subprocess.run(command(write(tmp_path, TELL), f"{tmp_path}/rank", *words), timeout=30)
    assert result.returncode == 0
    for rank in range(3):
        place, given = json.loads((tmp_path / f"rank{rank}").read_text())
        assert place == [str(rank), str(rank), "3", "3", "127.0.0.1", "29555"]
        assert given == words


def started(launcher: NodeLauncher, folder: Path, name: str, preload: str, secret: str = "s") -> list[dict]:
    """Start two ranks that look at themselves, with a module `ahead` to import; return what they saw."""
    (folder / "ahead.py").write_text("import os\nPID = os.getpid()\n")
    program = str(write(folder, LOOK))
    first, *rest = local_ranks_command("torch", has_gpus=False)[:-1]
    words = [first, *rest, f"--preload={preload}", "--nproc_per_node=2", "--master_port=1", program, f"{folder}/{name}"]
    # Without nvidia-smi's library deepspeed would ask CUDA for GPUs.
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(folder)}
    launcher.start(words, environment(SECRET=secret, MARK="m", **variables))
    while launcher.poll() is None:
        time.sleep(0.02)
    assert launcher.returncode == 0
    told = [json.loads((folder / f"{name}{rank}").read_text()) for rank in range(2)]
    for rank, one in enumerate(told):
        assert one["place"] == {"RANK": str(rank), "LOCAL_RANK": str(rank), "MARK": "m"} | dict.fromkeys(
            ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2"
        )
        assert one["words"] == [program, f"{folder}/{name}"]
        assert (one["main"], one["path"], one["secret"]) == (program, str(folder), secret)
    return told


def test_the_ranks_of_all_starts_share_what_one_process_has_imported(tmp_path: Path) -> None:
    with contextlib.closing(NodeLauncher()) as launcher:
        ranks = started(launcher, tmp_path, "a", "absent,ahead") + started(launcher, tmp_path, "b", "ahead", "new")
        assert [rank["name"] for rank in ranks] == ["rank 0", "rank 1"] * 2
        assert {rank["importer"] for rank in ranks} == {rank["parent"] for rank in ranks} == {launcher.pid}
        first = launcher.pid
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        again = started(launcher, tmp_path, "c", "ahead")
        assert {rank["importer"] for rank in again} == {launcher.pid} != {first}
        last = psutil.Process(launcher.pid)
    assert not last.is_running()


@pytest.mark.slow
def test_what_is_imported_ahead_leaves_cuda_and_threads_to_the_ranks(tmp_path: Path) -> None:
    """A process that has used CUDA cannot be forked, nor one that holds the locks of other threads."""
    preload = local_ranks_command("deepspeed", has_gpus=True)[-1].partition("=")[2]
    with contextlib.closing(NodeLauncher()) as launcher:
        ranks = started(launcher, tmp_path, "rank", f"ahead,{preload}")
        assert {rank["importer"] for rank in ranks} == {launcher.pid}
    assert [(rank["torch"], rank["threads"], rank["spoilt"]) for rank in ranks] == [(True, 1, False)] * 2


def test_ranks_whose_parent_has_used_cuda_are_programs_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("class cuda:\n    _is_in_bad_fork = staticmethod(lambda: True)\n")
    with contextlib.closing(NodeLauncher()) as launcher:
        ranks = started(launcher, tmp_path, "rank", "ahead,torch")
        assert all(rank["importer"] not in (launcher.pid, rank["parent"]) for rank in ranks)
    assert not any(rank["torch"] for rank in ranks)
