"""A Slurm job, read from its variables, and what it adds to the arguments of its training."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from zerovision.launch.arguments import check_training
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import RunFolder
from zerovision.training.config import TrainConfig
from zerovision.training.observe.new_run import run_folder
from zerovision.training.world.launchers import job_port

TASK = "{task}"
SCONTROL_SECONDS = 60
NODE_LIST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.,\[\]-]*")


@dataclass(frozen=True)
class Job:
    """A Slurm job, or one task of an array.

    Attributes:
        slurm_id: what `scontrol` knows it by.
        name: '77', or '70-3' for task 3 of the array 70; the same after a requeue.
        task: number in its array, None outside one.
        restarts: how often Slurm has started it before.
        nodes: how many it has.
        node_list: which, as Slurm writes them.
        gpus: of its first node, None if it has none.
    """

    slurm_id: str
    name: str
    task: int | None
    restarts: int
    nodes: int
    node_list: str
    gpus: int | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Job | None:
        """Read Slurm's variables; None outside a job.

        Raises:
            UserError: for a value that Slurm would not give.
        """
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

    @property
    def preferred_port(self) -> int:
        """The port that this job's ranks meet on, if it is free."""
        return job_port(int(self.slurm_id))

    def check_gpus(self, ranks_per_node: int) -> None:
        """Raise a UserError if the job has fewer GPUs on a node than ranks are asked for."""
        if self.gpus is not None and self.gpus < ranks_per_node:
            cure = f"give {self.gpus}, or sbatch --gpus-per-node={ranks_per_node}"
            raise UserError(f"num_gpus {ranks_per_node}: the job has {self.gpus} GPU(s) on a node: {cure}.")


def training_arguments(arguments: list[str], job: Job | None) -> tuple[list[str], TrainConfig]:
    """Return the arguments of the training entry in a job, and the configuration that they give.

    Args:
        arguments: as the user gave them; `--model-type=` comes first.
        job: the job; None for a check outside one, in which every task is 0.

    Raises:
        UserError: for arguments that the training entry refuses, and if tasks of an array would share a run.
    """
    task = 0 if job is None else job.task
    if task is None and any(TASK in given for given in arguments):
        raise UserError(f"{TASK} stands for the number in a job array: give sbatch --array=0-3, or leave it out.")
    own = [given.replace(TASK, str(task)) for given in _own_model(arguments, task)]
    config = check_training(own)
    if job is None:
        return own, config
    if not config.run_name:
        own.append(f"--run-name=slurm-{job.name}")
    elif task is not None and str(task) not in re.findall(r"\d+", config.run_name):
        raise UserError(
            f"--run-name {config.run_name!r}: the tasks of a job array need names of their own: add {TASK}."
        )
    if _goes_on(job, run_folder(check_training(own)), own, config.resume):
        own.append("--resume=auto")
    return own, check_training(own)


def _goes_on(job: Job, folder: RunFolder, arguments: list[str], resume: str) -> bool:
    """Return whether to add --resume auto: without a --resume, or if a requeued job has a run to go on with."""
    if resume == "never":
        return job.restarts > 0 or not any(re.match(r"--resume(=|$)", given) for given in arguments)
    return job.restarts > 0 and folder.has_checkpoint


def _own_model(arguments: list[str], task: int | None) -> list[str]:
    """Replace several models with commas by the one of this task of an array."""
    flag, _, value = arguments[0].partition("=")
    models = value.split(",")
    if len(models) == 1:
        return arguments
    if task is None:
        raise UserError(f"model {value!r}: several models need a job array: sbatch --array=0-{len(models) - 1}.")
    if task >= len(models):
        raise UserError(f"model {value!r}: {len(models)} models, and this is task {task}: tasks count from 0.")
    return [f"{flag}={models[task]}", *arguments[1:]]


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """Return a variable as a number, None if it is not set or empty."""
    value = environment.get(name, "")
    if value and not re.fullmatch(r"[0-9]{1,18}", value):
        raise UserError(f"{name} {value!r}: expected a whole number, which Slurm sets.")
    return int(value) if value else None


def scontrol(*arguments: str, stderr: int | None = None) -> str | None:
    """Run Slurm's scontrol; return its output, None if it fails."""
    command = ["scontrol", *arguments]
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=SCONTROL_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def host_names(node_list: str) -> list[str]:
    """Return the hosts of a job, as `scontrol` reads 'node[01-04]'; raise a UserError if it cannot."""
    names = scontrol("show", "hostnames", node_list, stderr=subprocess.DEVNULL)
    if not names:
        raise UserError(f"SLURM_JOB_NODELIST {node_list!r}: scontrol cannot read it.")
    return names.split()
