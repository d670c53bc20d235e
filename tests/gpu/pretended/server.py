"""Runs jobs on pretended GPUs: reads them as lines of JSON, forks ranks for each, answers with lines of JSON.

Most of a short training would be its imports: the ranks are forked from this process, as `launch.local_ranks` does
it. It is started with the variables of `library.environment`; nothing in it may use CUDA before a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.gpu.pretended import garbage
from zerovision.launch.node_launcher import PRELOADED

# What each rank would import again; by the last DeepSpeed asks for PyTorch's compiler, which takes seconds.
AHEAD = (
    *PRELOADED,
    *("zerovision.planning.search", "zerovision.delivery.publish", "zerovision.training.data.arrays"),
    "zerovision.training.engines.torch_engine",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
MOST_SECONDS = 100.0  # of a job
SECONDS_AFTER_A_FAILURE = 5.0  # for the other ranks to end by themselves
MOST_BYTES = 8 * 10**9  # of a rank: a loop over garbage may never end
MOST_CHARACTERS = 20_000  # of what a rank has printed
POLL_SECONDS = 0.01


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job on as many ranks as it has GPUs; return what rank 0 found, and of a rank that failed how it ended.

    Args:
        job: `name` in `JOBS`, its `arguments`, and `gpus`.
    """
    gpus = job["gpus"]
    place = {"PRETENDED_GPUS": str(gpus)}
    if gpus > 1:
        place |= {"WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    with tempfile.TemporaryDirectory() as name:
        logs = [Path(name) / f"rank{rank}.log" for rank in range(gpus)]
        answer = Path(name) / "answer.json"
        ranks = [_fork(job, rank, place, log, answer) for rank, log in enumerate(logs)]
        failure = _wait(ranks)
        report = json.loads(answer.read_text()) if answer.exists() else {}
        if failure is not None:
            failed, how = failure
            report["failure"] = f"{logs[failed].read_text()[-MOST_CHARACTERS:]}\nrank {failed} {how}"
        return report


def _fork(job: Mapping[str, Any], rank: int, place: Mapping[str, str], log: Path, answer: Path) -> int:
    """Fork a rank, and return its process; what rank 0 finds is written to `answer`."""
    pid = os.fork()
    if not pid:
        try:
            _be_rank(job, rank, place, log, answer)
        finally:
            os._exit(1)
    return pid


def _be_rank(job: Mapping[str, Any], rank: int, place: Mapping[str, str], log: Path, answer: Path) -> NoReturn:
    with log.open("w") as output, open(os.devnull) as nothing:
        for file, stream in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(file.fileno(), stream)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    os.environ.update(place)
    if job["gpus"] > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    exit_code = 1
    try:
        from tests.gpu.pretended.jobs import JOBS

        found = JOBS[job["name"]](**job["arguments"])
        exit_code = found.get("exit_code", 0)
        if rank == 0:
            answer.write_text(json.dumps(found))
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # as the trainer itself: threads of gloo and DeepSpeed may abort an orderly end


def _wait(ranks: list[int]) -> tuple[int, str] | None:
    """Wait for all ranks to end; return the first that failed, and how. It leaves the others waiting for it."""
    running, failed = dict(enumerate(ranks)), None
    end = time.monotonic() + MOST_SECONDS
    while running:
        for rank, pid in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[rank]
                if status and failed is None:
                    failed = rank, f"ended with {os.waitstatus_to_exitcode(status)}"
                    end = time.monotonic() + SECONDS_AFTER_A_FAILURE
        if time.monotonic() > end:
            failed = failed or (min(running), f"did not end in {MOST_SECONDS:g} s")
            for pid in running.values():
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return failed


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def main() -> None:
    """Import all there is, and take jobs until there are no more."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # of the machine's own
    gc.disable()  # as `zerovision/launch/local_ranks.py`: a fifth of the imports' time
    garbage.mend_torch()
    for name in (*AHEAD, "tests.gpu.pretended.jobs"):
        with contextlib.suppress(ModuleNotFoundError):  # left for the ranks to report
            importlib.import_module(name)
    garbage.mend_deepspeed()
    garbage.mend_project()
    gc.freeze()  # else the ranks' collections would copy all pages of what is imported
    gc.enable()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
