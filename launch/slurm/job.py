"""Trains in a Slurm job: leads the ranks on all its nodes, and has the job requeued when it is cut short.

    python launch/slurm/job.py --ranks-per-node 8 -- --model-type mobilenet --strategy ddp --epochs 50

slurm_distributed.sh starts it on the first node of the job, and its --help explains. launch/cluster/cluster_run.py, a
child of this process, starts the ranks through srun. Slurm's signals come here and go on to it: SIGUSR1 before the time
limit, SIGTERM for scancel and preemption. It saves, and what follows is decided in launch/slurm/requeue.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch.cluster.cluster_plan import LAUNCHERS
from launch.process_tree import shell_exit_code
from launch.slurm.requeue import Fate, Progress, what_follows
from launch.slurm.scontrol import host_names, scontrol
from launch.slurm.slurm_arguments import Job, run_folder, training_arguments
from training.config import REPO_ROOT, TrainConfig
from training.errors import USER_ERROR_EXIT_CODE, UserError
from training.parallel.network_interfaces import port_if_free

HEARD = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
POLL_SECONDS = 0.1
LAUNCH = REPO_ROOT / "launch/cluster/cluster_run.py"
DOCTOR = REPO_ROOT / "scripts/doctor.py"


def main() -> int:
    """Train in the job that the environment tells of; return the job's exit code."""
    given = _parser().parse_args()
    received: list[int] = []
    try:
        job = Job.of(os.environ)
        arguments, config = training_arguments(given.arguments, job)
        if given.check:
            return 0
        if job is None:
            raise UserError("not in a Slurm job: submit scripts/slurm_distributed.sh with sbatch.")
        job.check_gpus(given.ranks_per_node)
        hosts = host_names(job.node_list)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    if given.preflight and not job.restarts and (code := _preflight(given.ranks_per_node, arguments)):
        return code
    for number in HEARD:
        signal.signal(number, lambda heard, _frame: received.append(heard))
    print(f"Slurm job {job.name} on {','.join(hosts)}, restart {job.restarts}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome.json"
        words = ["--remote-shell=srun", f"--hosts={','.join(hosts)}", f"--ranks-per-node={given.ranks_per_node}"]
        words += [f"--port={given.port or port_if_free(job.preferred_port)}", f"--launcher={given.launcher}"]
        words += [f"--max-restarts={given.max_restarts}", f"--stop-timeout={given.stop_timeout}"]
        words += ["--allow-differences"] * given.allow_differences
        command = [sys.executable, str(LAUNCH), *words, f"--outcome={outcome}", "--", *arguments]
        code, heard = _run(command, received)
        return _finish(job, config, Progress.after(code, outcome), was_told=signal.SIGTERM in heard)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-node", type=int, required=True, help="GPUs, or CPU ranks, on each node")
    parser.add_argument("--port", type=int, default=0, help="port that the ranks meet on (default: from the job)")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="direct", help="what starts the ranks of a node")
    parser.add_argument("--max-restarts", type=int, default=3, help="restarts in a row without a newer checkpoint")
    parser.add_argument("--stop-timeout", type=float, default=300, help="seconds the ranks have to save and stop")
    parser.add_argument("--preflight", action="store_true", help="let the doctor look first, at the job's first start")
    parser.add_argument("--allow-differences", action="store_true", help="train although the nodes' software differs")
    parser.add_argument("--check", action="store_true", help="only check the arguments")
    parser.add_argument("arguments", nargs="*", help="those of train_distributed.py, after --")
    return parser


def _preflight(ranks_per_node: int, arguments: list[str]) -> int:
    """Let the doctor examine the job's machines; return its exit code."""
    command = [sys.executable, str(DOCTOR), f"--gpus-per-node={ranks_per_node}", "--", *arguments]
    return subprocess.run(command).returncode


def _run(command: list[str], received: list[int]) -> tuple[int, set[int]]:
    """Run the launch and pass signals on to it; return its exit code, and the signals that came."""
    child = subprocess.Popen(command, start_new_session=True)
    heard: set[int] = set()
    while child.poll() is None:
        while received:
            number = received.pop(0)
            print(f"Slurm sends {signal.Signals(number).name}", flush=True)
            heard.add(number)
            child.send_signal(number)
        time.sleep(POLL_SECONDS)
    return shell_exit_code(child.returncode), heard | set(received)


def _finish(job: Job, config: TrainConfig, progress: Progress, *, was_told: bool) -> int:
    """Requeue the job where that may help; return its exit code."""
    record = run_folder(config).log_dir / "slurm" / f"{job.name}.json"
    earlier = Progress.read(record) if job.restarts else Progress()
    shown = scontrol("show", "job", "-o", job.slurm_id)
    if shown is None:
        _say(job, "scontrol show job has failed: not requeued")
    decision = what_follows(progress, earlier, Fate.of(shown or "", was_told=was_told))
    _say(job, decision.line)
    if decision.requeue:
        try:
            decision.progress.write(record)
        except OSError as error:  # without the record it could be requeued for ever
            _say(job, f"{record}: {error.strerror}: not requeued")
            return progress.code
        if scontrol("requeue", job.slurm_id) is None:
            _say(job, "scontrol requeue has failed: submit it again")
    return progress.code


def _say(job: Job, line: str) -> None:
    if line:
        print(f"Slurm job {job.name}: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
