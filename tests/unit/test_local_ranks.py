"""The program that starts the ranks directly: what they are told, and how it ends when one of them does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.unit.launching import environment
from zerovision.launch.node_launcher import NodeLauncher, local_ranks_command

WORDS = ["--data", "a b;$(exit 3)\n`", "--nproc_per_node"]
# What a rank sees of itself and of what was imported for it.
LOOK = """
import json, os, sys
import ahead, psutil
seen = psutil.Process()
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MARK")
place = {name: os.environ.get(name) for name in names}
torch = sys.modules.get("torch")
told = dict(place=place, words=sys.argv, name=seen.name(), parent=os.getppid(), importer=ahead.PID,
    main=sys.modules["__main__"].__file__, path=sys.path[0], secret=os.environ["SECRET"], torch=torch is not None,
    threads=len(os.listdir(f"/proc/{os.getppid()}/task")), spoilt=torch is not None and torch.cuda._is_in_bad_fork())
open(sys.argv[1] + os.environ["RANK"], "w").write(json.dumps(told))
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def started(launcher: NodeLauncher, folder: Path, name: str, preload: str, secret: str = "s") -> list[dict]:
    """Start two ranks that look at themselves, with a module `ahead` to import; return what they saw."""
    (folder / "ahead.py").write_text("import os\nPID = os.getpid()\n")
    program = str(write(folder, LOOK))
    words = [
        *local_ranks_command("torch", has_gpus=False)[:-1],
        f"--preload={preload}",
        "--nproc_per_node=2",
        "--master_port=29555",
    ]
    words += [program, f"{folder}/{name}", *WORDS]
    # Without nvidia-smi's library deepspeed would ask CUDA for GPUs.
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(folder)}
    launcher.start(words, environment(SECRET=secret, MARK="m", **variables))
    while launcher.poll() is None:
        time.sleep(0.02)
    assert launcher.returncode == 0
    told = [json.loads((folder / f"{name}{rank}").read_text()) for rank in range(2)]
    for rank, one in enumerate(told):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "MARK": "m"}
        assert one["place"] == place
        assert one["words"] == [program, f"{folder}/{name}", *WORDS]
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
