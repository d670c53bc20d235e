"""What the tests of the launchers share: running them, reading what they print, a repository with a stub entry."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = REPO_ROOT / "scripts"
LAUNCH = REPO_ROOT / "zerovision" / "launch"
USER_ERROR = 2
CORES = len(os.sched_getaffinity(0))
WORDS = {
    "launch_distributed.sh": ["mobilenet", "ddp", "2", "16", "3"],
    "launch_multi_node.sh": ["mobilenet", "ddp", "2", "4", "16", "3"],
    "slurm_distributed.sh": ["mobilenet", "ddp", "2", "16", "3"],
}
HOSTFILE = "node-1 slots=8\nnode-2 slots=8\n"

# Stands in for the training entry: writes heartbeats and stops on a signal as the trainer does, writes what it was
# given to STUB_FOLDER, and has one fault, the argument after --fault. A restart succeeds unless --always is given.
STUB_ENTRY = """
import json, os, signal, sys, tempfile, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from zerovision.training.base.heartbeat import FOLDER_VARIABLE, RESTARTS_VARIABLE, HeartbeatWriter, end_with_parent
received = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda given, frame: received.append((given, time.time())))
folder, rank, restarts = Path(os.environ["STUB_FOLDER"]), int(os.environ["RANK"]), int(os.environ[RESTARTS_VARIABLE])
heartbeat = HeartbeatWriter(Path(os.environ[FOLDER_VARIABLE]), rank, hang_timeout_s=3.0)
heartbeat.watch_stacks()
end_with_parent()
heartbeat.beat("start", allowed_s=60.0)
record, stop = folder / f"rank{rank}-{restarts}.json", folder / f"stop-{restarts}"

def write():
    record.with_suffix(".tmp").write_text(json.dumps(dict(pid=os.getpid(), ppid=os.getppid(), argv=sys.argv[1:],
        threads=os.environ["OMP_NUM_THREADS"], received=received, time=time.time(), port=os.environ["MASTER_PORT"],
        run_id=os.environ["ZEROVISION_RUN_ID"])))
    record.with_suffix(".tmp").rename(record)

def wait_for_the_other():
    while os.environ["WORLD_SIZE"] != "1" and not (folder / f"rank{1 - rank}-{restarts}.json").exists():
        heartbeat.beat("meet", allowed_s=60.0)
        time.sleep(0.02)

def leave(code):
    write()
    heartbeat.ended(code)
    sys.exit(code)

def sleep_for_ever():
    while True:
        time.sleep(0.1)

def train():
    fault = sys.argv[sys.argv.index("--fault") + 1] if "--fault" in sys.argv else ""
    if restarts and "--always" not in sys.argv:
        fault = "finish"
    if rank == 0:
        heartbeat.run_name("run-7")
        if restarts < sys.argv.count("--save"):
            heartbeat.checkpoint_saved(position=restarts)
    wait_for_the_other()
    heartbeat.beat("train", step=5)
    if fault.isdigit():
        leave(int(fault))
    if fault == "talk":  # more than pipes hold, and then a while nothing
        print("x" * 500_000, flush=True)
        time.sleep(2.5)
        fault = "finish"
    if rank == 1 and fault == "kill":
        write()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "sleep" and rank == 0:  # it comes to the step a little later than the rank that it then waits for
        time.sleep(0.7)
        heartbeat.beat("train", step=5)
    if fault == "sleep" or (rank == 0 and "--deaf" in sys.argv):
        sleep_for_ever()
    while fault not in ("finish", "silent") and not received and not stop.exists():
        heartbeat.beat("train", step=5)
        time.sleep(0.02)
    if received:
        stop.write_text(str(received[0][0]))  # all ranks agree
    heartbeat.beat("save", step=5, allowed_s=60.0)
    time.sleep(0.5)  # as if a checkpoint were written
    if stop.exists():
        leave(128 + int(stop.read_text()))
    if rank == 0 and fault == "finish":
        heartbeat.succeeded()
    leave(0)

tempfile.mkdtemp(prefix="pymp-")  # as multiprocessing leaves it when it is killed
write()
train()
"""
# Stands in for the check of the training's arguments, which the stub entry has others of.
STUB_COMMAND_LINE = """

def parse_args(words):
    return TrainConfig(batch_size=16, log_dir=os.environ.get("STUB_FOLDER", "logs")), False
"""


def environment(**changes: str) -> dict[str, str]:
    """A clean environment: this Python's tools first, no GPU unless a test pretends one."""
    dropped = {"CUDA_VISIBLE_DEVICES", "MASTER_PORT", "HOSTFILE", "OMP_NUM_THREADS", "STOP_TIMEOUT", "MAX_RESTARTS"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("SLURM_")}
    return kept | {"PATH": f"{Path(sys.executable).parent}:{kept['PATH']}"} | changes


def hear_ctrl_c() -> None:
    """Undo what a background job of a shell inherits: SIGINT ignored, which launchers rightly leave so."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def launch(script: str, words: list[str], cwd: Path = REPO_ROOT, **changes: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(SCRIPTS / script), *words],
        cwd=cwd,
        env=environment(**({"DRY_RUN": "1"} | changes)),
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def words_of(line: str) -> list[str]:
    """Read a printed command as a shell would, without running it."""
    reader = subprocess.run(["bash", "-c", f"set -- {line}\nprintf '%s\\0' \"$@\""], capture_output=True, check=True)
    return reader.stdout.decode().split("\0")[:-1]  # not text=True, which would read a carriage return as a line feed


def pretend_gpus(folder: Path, count: int) -> str:
    """Put an nvidia-smi that lists `count` GPUs into a folder; return the PATH on which it is found first."""
    lines = "".join(f"echo 'GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i:08d})'\n" for i in range(count))
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/bash\n{lines}")
    tool.chmod(0o755)
    return f"{folder}:{environment()['PATH']}"


def assert_refused(result: subprocess.CompletedProcess, *parts: str) -> None:
    assert result.returncode == USER_ERROR, result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for part in parts:
        assert part in result.stderr


def stub_repo(folder: Path) -> Path:
    """Make a copy of the repository whose training entry is a stub, and whose .venv is this environment."""
    root = folder / "repo"
    shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for folder_name in ("zerovision", "models", "deepspeed_configs"):
        shutil.copytree(REPO_ROOT / folder_name, root / folder_name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO_ROOT / "requirements.txt", root)
    (root / "scripts" / "train_distributed.py").write_text(STUB_ENTRY)
    with (root / "zerovision" / "training" / "config" / "command_line.py").open("a") as command_line:
        command_line.write(STUB_COMMAND_LINE)
    (root / "zerovision" / "delivery" / "evaluation_files.py").write_text("")
    (root / "zerovision" / "training" / "run.py").write_text("")  # the ranks need none of what it imports
    (root / ".venv").symlink_to(sys.prefix)
    return root
