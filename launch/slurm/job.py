"""Trains in a Slurm job: what scripts/slurm_distributed.sh hands over to, with its arguments.

    python launch/slurm/job.py mobilenet ddp 8 16 50

It runs on the first node of the job, and starts the ranks of all nodes through srun. Slurm's signals come here: SIGUSR1
before the time limit, SIGTERM for scancel and preemption. The ranks save, and launch/slurm/requeue.py decides whether
the job is requeued.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch.arguments import print_command, read_arguments, run_launcher, run_preflight
from launch.auto_strategy import resolve_strategy
from launch.cluster.multi_node import train
from launch.cluster.plan import Plan
from launch.new_run import check_new_run
from launch.slurm.arguments import Job, training_arguments
from launch.slurm.requeue import JobRecord, JobState, what_follows
from launch.slurm.scontrol import host_names, scontrol
from training.base.errors import UserError
from training.config import TrainConfig
from training.observe.new_run import run_folder
from training.world.network_interfaces import port_if_free


def main(arguments: list[str]) -> int:
    """Train in the job that the environment describes; return the job's exit code."""
    given = read_arguments("slurm_distributed.sh", arguments, os.environ)
    job = Job.of(os.environ)
    if job is None and not given.dry_run:
        raise UserError("not in a Slurm job: submit it with sbatch, or set DRY_RUN=1.")
    nodes = job.nodes if job else 1
    given = resolve_strategy(given, nodes)
    training, config = training_arguments(given.training, job)
    if job or config.gradient_accumulation_steps == 1:  # outside a job, sbatch may be given more nodes later
        check_new_run(config, [nodes * given.ranks_per_node])
    if job is None or given.dry_run:
        print_command(given.command(__file__))
        return 0
    job.check_gpus(given.ranks_per_node)
    hosts = host_names(job.node_list)
    if not job.restarts and (code := run_preflight(given, training)):
        return code
    port = given.master_port or port_if_free(job.preferred_port)
    plan = Plan(given, training, config, hosts, "srun", port)
    received, all_received = _receive_signals()
    print(f"Slurm job {job.name} on {','.join(hosts)}, restart {job.restarts}", flush=True)
    record = _train(plan, given.max_restarts, received)
    return _finish(job, config, record, received, was_terminated=signal.SIGTERM in all_received)


def _train(plan: Plan, max_restarts: int, received: list[int]) -> JobRecord:
    """Train; an exception of the launch counts as a failure, after which the job may be requeued."""
    try:
        outcome = train(plan, max_restarts, received)
    except Exception as error:
        traceback.print_exc()
        return JobRecord(1, f"the launch failed with {type(error).__name__}")
    return JobRecord(outcome.ending.code, outcome.ending.reason, outcome.position)


def _receive_signals() -> tuple[list[int], set[int]]:
    """Handle Slurm's signals; return the list for the launch, which it empties, and the set of all that came."""
    received: list[int] = []
    all_received: set[int] = set()

    def receive(number: int, _frame: object) -> None:
        # Not print: the signal may have come while another print was writing.
        os.write(1, f"Slurm sends {signal.Signals(number).name}\n".encode())
        received.append(number)
        all_received.add(number)

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, receive)
    return received, all_received


def _finish(job: Job, config: TrainConfig, record: JobRecord, received: list[int], *, was_terminated: bool) -> int:
    """Requeue the job if that may help; return its exit code."""
    path = run_folder(config).log_dir / "slurm" / f"{job.name}.json"
    earlier = JobRecord.read(path) if job.restarts else JobRecord()
    shown = scontrol("show", "job", "-o", job.slurm_id)
    if shown is None:
        _print(job, "scontrol show job has failed: not requeued")
    decision = what_follows(record, earlier, JobState.of(shown or "", was_terminated=was_terminated))
    _print(job, decision.line)
    if decision.requeue:
        try:
            decision.record.write(path)
        except OSError as error:  # without the record it could be requeued for ever
            _print(job, f"{path}: {error.strerror}: not requeued")
            return record.code
        received.clear()
        # Slurm then ends the job with SIGTERM, which may reach scontrol before it has returned.
        if scontrol("requeue", job.slurm_id) is None and signal.SIGTERM not in received:
            _print(job, "scontrol requeue has failed: submit it again")
    return record.code


def _print(job: Job, line: str) -> None:
    if line:
        print(f"Slurm job {job.name}: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_launcher(main)
