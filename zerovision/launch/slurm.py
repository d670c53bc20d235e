"""Trains in a Slurm job; scripts/slurm_distributed.sh runs this program with its own arguments.

    python zerovision/launch/slurm.py slurm_distributed.sh mobilenet ddp 8 16 50

The program runs on the first node of the job, and starts the ranks of all nodes with srun. It receives Slurm's signals:
SIGUSR1 before the time limit, SIGTERM on scancel and preemption. The ranks then save a checkpoint, and `what_follows`
decides whether to requeue the job.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zerovision.launch.arguments import check_training, print_command, read_arguments, run_launcher
from zerovision.launch.hosts import host_names, scontrol
from zerovision.launch.launch import preflight, train
from zerovision.launch.node_run import FINAL_CODES, receive_signals
from zerovision.launch.nodes import Nodes
from zerovision.launch.plan import Plan, check_new_run, resolve_strategy
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import replacing
from zerovision.training.base.run_folder import RunFolder
from zerovision.training.base.units import plural
from zerovision.training.config import TrainConfig
from zerovision.training.observe.new_run import run_folder
from zerovision.training.world.launchers import job_port, remember_line
from zerovision.training.world.machine import port_if_free

TASK = "{task}"
NODE_LIST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.,\[\]-]*")
WARNED_CODE = 128 + signal.SIGUSR1
TIME_LIMIT = "SIGUSR1, the time limit is near"


@dataclass(frozen=True)
class Job:
    """A Slurm job, or one task of an array."""

    slurm_id: str  # for `scontrol`
    name: str  # '77', or '70-3' for task 3 of array 70; unchanged by a requeue
    task: int | None  # in its array; None outside an array
    restarts: int  # times that Slurm has restarted the job
    nodes: int
    node_list: str  # in Slurm's notation
    gpus: int | None  # on the first node; None if Slurm does not report it

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Job | None:
        """Return the job that Slurm's environment variables describe (None outside a job), or raise a UserError."""
        slurm_id = _number(environment, "SLURM_JOB_ID")
        if slurm_id is None:
            return None
        array, task = _number(environment, "SLURM_ARRAY_JOB_ID"), _number(environment, "SLURM_ARRAY_TASK_ID")
        node_list = environment.get("SLURM_JOB_NODELIST", "localhost")
        if not NODE_LIST.fullmatch(node_list):
            raise UserError(f"SLURM_JOB_NODELIST {node_list!r}: expected names as in node[01-04].")
        return cls(
            slurm_id=str(slurm_id),
            name=str(slurm_id) if array is None or task is None else f"{array}-{task}",
            task=task,
            restarts=_number(environment, "SLURM_RESTART_COUNT") or 0,
            nodes=_number(environment, "SLURM_JOB_NUM_NODES") or 1,
            node_list=node_list,
            gpus=_number(environment, "SLURM_GPUS_ON_NODE"),
        )

    def check_gpus(self, ranks_per_node: int) -> None:
        """Raise a UserError if the job has fewer GPUs per node than ranks."""
        if self.gpus is not None and self.gpus < ranks_per_node:
            cure = f"use {self.gpus}, or sbatch --gpus-per-node={ranks_per_node}"
            raise UserError(f"num_gpus {ranks_per_node}: the job has {plural(self.gpus, 'GPU')} per node: {cure}.")


def training_arguments(arguments: list[str], job: Job | None) -> tuple[list[str], TrainConfig]:
    """Return the training entry point's arguments in a job, and the configuration they describe, or raise a UserError.

    `arguments` are as the user gave them, `--model-type=` first. Without a job, for a check, the task's number is 0.
    """
    task = 0 if job is None else job.task
    if task is None and any(TASK in given for given in arguments):
        raise UserError(f"{TASK} stands for the number in a job array: use sbatch --array=0-3, or leave it out.")
    own = [given.replace(TASK, str(task)) for given in _own_model(arguments, task)]
    config = check_training(own)
    if job is None:
        return own, config
    if not config.run_name:
        own.append(f"--run-name=slurm-{job.name}")
    elif task is not None and str(task) not in re.findall(r"\d+", config.run_name):
        raise UserError(f"--run-name {config.run_name!r}: the tasks of a job array need different names: add {TASK}.")
    if _goes_on(job, run_folder(check_training(own)), own, config.resume):
        own.append("--resume=auto")
    return own, check_training(own)


def _goes_on(job: Job, folder: RunFolder, arguments: list[str], resume: str) -> bool:
    """Return whether to add --resume auto: True if --resume is missing, or if a requeued job has a run to resume."""
    if resume == "never":
        return job.restarts > 0 or not any(re.match(r"--resume(=|$)", given) for given in arguments)
    return job.restarts > 0 and folder.has_checkpoint


def _own_model(arguments: list[str], task: int | None) -> list[str]:
    """Replace a comma-separated list of models with the model of this array task."""
    flag, _, value = arguments[0].partition("=")
    models = value.split(",")
    if len(models) == 1:
        return arguments
    if task is None:
        raise UserError(f"model {value!r}: several models need a job array: use sbatch --array=0-{len(models) - 1}.")
    if task >= len(models):
        raise UserError(f"model {value!r}: {len(models)} models, but this is task {task}: tasks are counted from 0.")
    return [f"{flag}={models[task]}", *arguments[1:]]


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """Return an environment variable as a number, or None if it is unset or empty."""
    value = environment.get(name, "")
    if value and not re.fullmatch(r"[0-9]{1,18}", value):
        raise UserError(f"{name} {value!r}: expected the whole number that Slurm sets.")
    return int(value) if value else None


class JobState(Enum):
    """What Slurm is doing with a job."""

    RUNNING = "nothing"
    PREEMPTED = "it needs the nodes for another job, and sent SIGTERM"
    ENDING = "scancel, the time limit, or a preemption that requeues the job"

    @classmethod
    def of(cls, shown: str, *, was_terminated: bool) -> JobState:
        """Return the state in the output of `scontrol show job`, given whether SIGTERM was received."""
        values = dict(re.findall(r"(\S+?)=(\S*)", shown))
        if values.get("JobState") != "RUNNING":
            return cls.ENDING
        if values.get("PreemptTime", "None") != "None":
            return cls.PREEMPTED  # Slurm treats a job that ends within its grace time as finished, not preempted
        return cls.ENDING if was_terminated else cls.RUNNING


@dataclass(frozen=True)
class JobRecord:
    """What a job records about its starts."""

    code: int = 0  # of the last start
    reason: str = ""  # why that start ended
    position: int = -1  # of the newest checkpoint of any start, or -1
    failures: tuple[str, ...] = ()  # reasons since that checkpoint, with every number replaced by N

    @classmethod
    def read(cls, path: Path) -> JobRecord:
        """Read the record of an earlier start, or return an empty one."""
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


def what_follows(last: JobRecord, earlier: JobRecord, state: JobState) -> tuple[str, JobRecord | None]:
    """Return a message about the last start, and the record to requeue the job with, or None not to requeue it."""
    if last.code == 0 or state is JobState.ENDING:
        return "", None
    if last.position > earlier.position:
        earlier = JobRecord(position=last.position)
    if state is JobState.PREEMPTED:
        return "preempted: requeued", earlier
    is_limit = last.code == WARNED_CODE
    if last.code in FINAL_CODES and not is_limit:
        return "", None
    reason = TIME_LIMIT if is_limit else last.reason or f"exit code {last.code}"
    # "no sign of life for 11 s" and "... 12 s" are the same failure, even on different nodes.
    failure = re.sub(r"\d+", "N", reason)
    if failure in earlier.failures:
        return f"{reason}, as before, without a newer checkpoint: not requeued", None
    record = JobRecord(last.code, reason, earlier.position, (*earlier.failures, failure))
    return f"{reason}: requeued, to continue from its newest checkpoint", record


def main(words: list[str]) -> int:
    """Train in the job that the environment describes; return the job's exit code."""
    given = read_arguments(words[0], words[1:], os.environ)
    job = Job.of(os.environ)
    if job is None and not given.dry_run:
        raise UserError("not in a Slurm job: submit it with sbatch, or set DRY_RUN=1.")
    count = job.nodes if job else 1
    given = resolve_strategy(given, count)
    training, config = training_arguments(given.training, job)
    if job or config.gradient_accumulation_steps == 1:  # outside a job, the user may later give sbatch more nodes
        check_new_run(config, [count * given.ranks_per_node])
    if job is None or given.dry_run:
        print_command(given.command(__file__))
        return 0
    job.check_gpus(given.ranks_per_node)
    hosts = host_names(job.node_list)
    port = given.master_port or port_if_free(job_port(int(job.slurm_id)))
    plan = Plan(given, training, config, hosts, "srun", port)
    nodes = Nodes(plan.shell)
    if not job.restarts and (code := preflight(plan, nodes)):
        return code
    remember_line(["sbatch", f"--nodes={count}"], given.script, words[1:])
    heard: set[int] = set()

    def note(number: int) -> None:
        heard.add(number)
        # Not print: the signal may have interrupted another print.
        os.write(1, f"Slurm sends {signal.Signals(number).name}\n".encode())

    received = receive_signals(note)
    print(f"Slurm job {job.name} on {','.join(hosts)}, restart {job.restarts}", flush=True)
    record = _train(plan, nodes, received)
    return _finish(job, config, record, received, was_terminated=signal.SIGTERM in heard)


def _train(plan: Plan, nodes: Nodes, received: list[int]) -> JobRecord:
    """Train, and return the record of this start. After an exception in the launch, the job may be requeued."""
    try:
        outcome = train(plan, nodes, received)
    except Exception as error:
        traceback.print_exc()
        return JobRecord(1, f"the launch failed with {type(error).__name__}")
    return JobRecord(outcome.ending.code, outcome.ending.reason, outcome.position)


def _finish(job: Job, config: TrainConfig, record: JobRecord, received: list[int], *, was_terminated: bool) -> int:
    """Requeue the job if that may help; return the job's exit code."""
    path = run_folder(config).log_dir / "slurm" / f"{job.name}.json"
    earlier = JobRecord.read(path) if job.restarts else JobRecord()
    shown = scontrol("show", "job", "-o", job.slurm_id)
    if shown is None:
        _print(job, "scontrol show job failed: not requeued")
    line, kept = what_follows(record, earlier, JobState.of(shown or "", was_terminated=was_terminated))
    _print(job, line)
    if kept is not None:
        try:
            kept.write(path)
        except OSError as error:  # without the record, the job could be requeued forever
            _print(job, f"{path}: {error.strerror}: not requeued")
            return record.code
        received.clear()
        # Slurm then ends the job with SIGTERM, which may reach scontrol before it has returned.
        if scontrol("requeue", job.slurm_id) is None and signal.SIGTERM not in received:
            _print(job, "scontrol requeue failed: submit it again")
    return record.code


def _print(job: Job, line: str) -> None:
    if line:
        print(f"Slurm job {job.name}: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_launcher(main)
