"""Trains in a Slurm job: what scripts/slurm_distributed.sh hands over to, with its arguments.

    python zerovision/launch/slurm/job.py mobilenet ddp 8 16 50

It runs on the first node of the job, and starts the ranks of all nodes through srun. Slurm's signals come here: SIGUSR1
before the time limit, SIGTERM for scancel and preemption. The ranks save, and `what_follows` decides whether the job is
requeued.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import traceback
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from zerovision.launch.arguments import print_command, read_arguments, run_launcher, run_preflight
from zerovision.launch.before_start import check_new_run, resolve_strategy
from zerovision.launch.cluster.multi_node import train
from zerovision.launch.cluster.plan import Plan
from zerovision.launch.node_run import FINAL_CODES
from zerovision.launch.slurm.arguments import Job, host_names, scontrol, training_arguments
from zerovision.training.base.atomic_write import replacing
from zerovision.training.base.errors import UserError
from zerovision.training.config import TrainConfig
from zerovision.training.observe.new_run import run_folder
from zerovision.training.world.launchers import remember_line
from zerovision.training.world.network_interfaces import port_if_free

WARNED_CODE = 128 + signal.SIGUSR1
TIME_LIMIT = "SIGUSR1, the time limit is near"


class JobState(Enum):
    """What Slurm does with a job."""

    RUNNING = "nothing"
    PREEMPTED = "it wants the nodes for another job, and has sent SIGTERM"
    ENDING = "it ends it: scancel, the time limit, or a preemption that requeues by itself"

    @classmethod
    def of(cls, shown: str, *, was_terminated: bool) -> JobState:
        """Read it from `scontrol show job`; `was_terminated` is whether SIGTERM came."""
        values = dict(re.findall(r"(\S+?)=(\S*)", shown))
        if values.get("JobState") != "RUNNING":
            return cls.ENDING
        if values.get("PreemptTime", "None") != "None":
            return cls.PREEMPTED  # a job that ends in its grace time counts as ended, and not as preempted
        return cls.ENDING if was_terminated else cls.RUNNING


@dataclass(frozen=True)
class JobRecord:
    """What a job remembers of its starts.

    Attributes:
        code: exit code of its last start.
        reason: why that ended.
        position: of the newest checkpoint that any start has saved, -1 for none.
        failures: reasons since then why starts have ended, without numbers.
    """

    code: int = 0
    reason: str = ""
    position: int = -1
    failures: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> JobRecord:
        """Read the record that an earlier start has written; an empty one if there is none."""
        try:
            values = json.loads(path.read_text())
            return cls(**{**values, "failures": tuple(values["failures"])})
        except (OSError, ValueError, TypeError, KeyError):
            return cls()

    def write(self, path: Path) -> None:
        """Write the record, for the next start."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(dataclasses.asdict(self)))


@dataclass(frozen=True)
class RequeueDecision:
    """Whether the job is requeued, the line that gives the reason, and the record for the next start."""

    requeue: bool
    line: str
    record: JobRecord


def what_follows(last: JobRecord, earlier: JobRecord, state: JobState) -> RequeueDecision:
    """Decide whether a job is requeued after a start of it has ended.

    Args:
        last: of the start that has ended.
        earlier: the record of those before it.
        state: what Slurm does with the job.
    """
    if last.code == 0 or state is JobState.ENDING:
        return RequeueDecision(False, "", last)
    if last.position > earlier.position:
        earlier = JobRecord(position=last.position)
    if state is JobState.PREEMPTED:
        return RequeueDecision(True, "preempted: requeued", earlier)
    is_limit = last.code == WARNED_CODE
    if last.code in FINAL_CODES and not is_limit:
        return RequeueDecision(False, "", last)
    reason = TIME_LIMIT if is_limit else last.reason or f"exit code {last.code}"
    # "no sign of life for 11 s" and "... 12 s" are the same failure; so are those of two nodes.
    failure = re.sub(r"\d+", "N", reason)
    record = JobRecord(last.code, reason, earlier.position, (*earlier.failures, failure))
    if failure in earlier.failures:
        return RequeueDecision(False, f"{reason}: as before, and no newer checkpoint since: not requeued", record)
    return RequeueDecision(True, f"{reason}: requeued, goes on from its newest checkpoint", record)


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
    remember_line(["sbatch", f"--nodes={nodes}"], given.script, arguments)
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
