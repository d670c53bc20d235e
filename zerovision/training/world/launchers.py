"""Reads this process's rank from the variables that its launcher set, and checks how ranks form a mesh.

torchrun, similar launchers (such as accelerate with `--multi_gpu`, even on CPUs) and our own launcher set RANK,
LOCAL_RANK and WORLD_SIZE. srun sets different variables.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence

from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import ENTRIES, as_typed, shown_path
from zerovision.training.base.units import plural

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_LINE_VARIABLE = "ZEROVISION_LINE"  # the command line that started our launcher
PORT_OF_NONE = "0"  # MASTER_PORT of a process that trains alone
_FIRST_JOB_PORT, _JOB_PORTS = 20000, 10000
_WAYS = (
    "start training with scripts/launch_distributed.sh (under Slurm: sbatch scripts/slurm_distributed.sh) or "
    "torchrun --nproc_per_node=N scripts/train_distributed.py."
)


def launched_world() -> tuple[int, int, int, int]:
    """Return (rank, local rank, ranks on this machine, all ranks) from the environment, or raise a UserError."""
    adopt_rank()
    # Launchers use different names; torchrun sets LOCAL_WORLD_SIZE.
    local_size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    given = {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}
    if not given:
        return 0, 0, 1, 1
    try:
        rank, local_rank, size = (int(given[name]) for name in RANK_VARIABLES)
        return rank, local_rank, int(local_size), size
    except (KeyError, ValueError):
        said = ", ".join(f"{name}={given.get(name, 'missing')}" for name in RANK_VARIABLES)
        raise UserError(f"the launcher's environment is incomplete ({said}): {_WAYS}") from None


def remember_line(start: Sequence[str], script: str, arguments: Sequence[str]) -> None:
    """Pass the command line that started this launcher to its ranks, in an environment variable."""
    typed = as_typed(" ".join([*start, script])).split()
    words = [*start, shown_path(ENTRIES / script)] if typed[-1] == script else typed
    os.environ[_LINE_VARIABLE] = shlex.join([*words, *arguments])


def remembered_line() -> dict[str, str]:
    """Return the variable that `remember_line` set, for ranks on other machines; {} if it is not set."""
    return {name: os.environ[name] for name in (_LINE_VARIABLE,) if name in os.environ}


def line_to_go_on(run_name: str, otherwise: Sequence[str]) -> str:
    """Return our launcher's command line, or `otherwise` if there is none, with the flags for resuming a run."""
    words = shlex.split(os.environ.get(_LINE_VARIABLE, "")) or otherwise
    flags, pairs = ("--run-name", "--resume"), zip(["", *words], words, strict=False)
    kept = [word for before, word in pairs if before not in flags and word.partition("=")[0] not in flags]
    return shlex.join([*kept, f"--run-name={run_name}", "--resume=auto"])


def environment_for_ranks() -> dict[str, str]:
    """Return the environment for a launcher that this process starts.

    Raises:
        UserError: if this process is itself a rank, or runs in one of several pods.
    """
    environment = dict(os.environ)
    if environment.get("MASTER_PORT") == PORT_OF_NONE:  # another thread of this process trains alone
        for name in (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
    if "LOCAL_RANK" not in environment:  # a job with a single pod
        refuse_a_pod_alone(environment)
        environment = {name: value for name, value in environment.items() if name not in RANK_VARIABLES}
    if "RANK" in environment:
        raise UserError("gpus: this process is already a rank, and its launcher started the others: leave it out.")
    return environment


def adopt_rank() -> None:
    """Set torchrun's variables, which PyTorch, the engines and our code use, in a process that srun started.

    This does nothing if the variables are already set, or if this is the only process.

    Raises:
        UserError: if several processes were started or requested, and this process cannot find its rank or the others.
    """
    refuse_a_pod_alone(os.environ)
    if os.environ.get("RANK") == "0" and os.environ.get("WORLD_SIZE") == "1":  # a job with a single pod
        os.environ.setdefault("LOCAL_RANK", "0")
    if any(name in os.environ for name in RANK_VARIABLES):
        return
    numbers = _numbers_of_srun()
    if numbers is None:
        if (size := _number("SLURM_STEP_NUM_TASKS")) > 1 and "SLURM_PTY_PORT" not in os.environ:
            raise UserError(f"srun started {size} processes, and each would train on its own: {_WAYS}")
        if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ:
            raise UserError(
                "accelerate was told to start several processes but started only one: replace --cpu with --multi_gpu, "
                f"which also starts processes on CPUs, or {_WAYS}"
            )
        return
    # The first node of the step runs rank 0: gpu03 for 'gpu[03-05,9],cpu1'.
    first = re.sub(r"\[(\w+)[^]]*\]", r"\1", os.environ.get("SLURM_STEP_NODELIST", "")).split(",")[0]
    host = "127.0.0.1" if numbers[2] == numbers[3] else first
    port = job_port(_number("SLURM_JOB_ID"))
    place = {"MASTER_ADDR": os.environ.get("MASTER_ADDR") or host, "MASTER_PORT": os.environ.get("MASTER_PORT") or port}
    names = (*RANK_VARIABLES, "LOCAL_WORLD_SIZE")
    os.environ |= {name: str(value) for name, value in (*zip(names, numbers, strict=True), *place.items())}


def refuse_a_pod_alone(environment: Mapping[str, str]) -> None:
    """Refuse to train alone in one of several pods, each of which is a node of the same training job.

    Kubeflow's PyTorchJob sets RANK and WORLD_SIZE in each pod, but not LOCAL_RANK. TrainJob and newer
    versions of PyTorchJob also set the variables that correspond to torchrun's flags, such as PET_NNODES.

    Raises:
        UserError: if the variables show that this process runs in one of several pods.
    """
    pods = environment.get("PET_NNODES") or (environment.get("WORLD_SIZE") if "RANK" in environment else "") or "1"
    if "LOCAL_RANK" in environment or pods.rpartition(":")[2] in ("0", "1"):  # '1:4' means 1 to 4
        return
    names = [name for name in ("RANK", "WORLD_SIZE", "PET_NNODES") if name in environment]
    said = " and ".join(f"{name}={environment[name]}" for name in names)
    raise UserError(
        f"{said}, but LOCAL_RANK is not set: this is one of several pods, and each would train alone. Run torchrun "
        "scripts/train_distributed.py ... in each, with the flags in docs/guides/several-machines.md (Kubernetes); "
        f"to train only in this pod, unset {' '.join(names)}."
    )


def job_port(job: int) -> int:
    """Return a port specific to a Slurm job, because jobs of one user, or tasks of one array, may share a node."""
    return _FIRST_JOB_PORT + job % _JOB_PORTS


def _numbers_of_srun() -> tuple[int, ...] | None:
    """Return rank, local rank, total ranks and ranks on this machine for an srun task; None for any other process."""
    # SLURM_NTASKS is not used, because it is also set in a job's shell. A pseudo-terminal means an interactive shell.
    size, node = _number("SLURM_STEP_NUM_TASKS"), _number("SLURM_NODEID")
    # '2(x3),1' means 2 tasks on each of 3 nodes, and 1 task on the fourth.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(count) for count, times in groups for _ in range(int(times or 1))]
    if size < 2 or not 0 <= node < len(tasks) or "SLURM_PTY_PORT" in os.environ:
        return None
    return _number("SLURM_PROCID"), _number("SLURM_LOCALID"), size, tasks[node]


def _number(name: str) -> int:
    """Return an environment variable as a number, or -1 if the variable is missing or not a number."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else -1


def data_ranks(ranks: int, mesh: Mapping[str, int]) -> int:
    """Return the number of groups of ranks that read different images; see `mesh.form_mesh` for the arguments.

    Raises:
        UserError: if the ranks cannot be divided into this mesh.
    """
    whole = math.prod(mesh.values())
    groups, rest = divmod(ranks, whole)
    if rest or not groups:
        flags = " x ".join(f"--{name.replace('_', '-')} {size}" for name, size in [*mesh.items()][::-1])
        fitting = f"{groups * whole} or {(groups + 1) * whole}" if groups else f"{whole}"
        raise UserError(f"{flags}: {plural(ranks, 'rank')} cannot form groups of {whole}: start {fitting} ranks.")
    return groups
