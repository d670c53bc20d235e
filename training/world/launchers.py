"""Which rank this process is, by the variables of the launcher that started it.

torchrun, deepspeed, accelerate (`--multi_gpu`, on CPUs too) and our own launchers set RANK, LOCAL_RANK and WORLD_SIZE.
mpirun, which accelerate starts for `--mpirun_hostfile`, and srun number their processes in variables of their own.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence

from training.base.errors import UserError
from training.base.run_folder import shown_path
from training.base.settings import REPO_ROOT

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# Rank, local rank, all ranks, ranks of this machine. srun sets PMI_RANK and PMI_SIZE too, but not the other two.
_MPIRUN_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)
_POD_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "PET_NNODES", "PET_NODE_RANK")
_LINE_VARIABLE = "ZEROVISION_LINE"  # what was typed to start our launcher
PORT_OF_NONE = "0"  # MASTER_PORT of a process that trains alone
_FIRST_JOB_PORT, _JOB_PORTS = 20000, 10000
_DEFAULT_PORT = 29500  # torchrun's
_WAYS = (
    "Start with scripts/launch_distributed.sh (sbatch scripts/slurm_distributed.sh under Slurm), or with "
    "torchrun --nproc_per_node=N scripts/train_distributed.py."
)


def launched_world() -> tuple[int, int, int, int]:
    """Return (rank, local rank, ranks on this machine, all ranks) from the environment; (0, 0, 1, 1) by default.

    Raises:
        UserError: if the variables are incomplete or not numbers; see `adopt_rank`, too.
    """
    adopt_rank()
    # LOCAL_SIZE is deepspeed's variable, LOCAL_WORLD_SIZE torchrun's.
    local_size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    given = {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}
    if not given:
        return 0, 0, 1, 1
    try:
        rank, local_rank, size = (int(given[name]) for name in RANK_VARIABLES)
        return rank, local_rank, int(local_size), size
    except (KeyError, ValueError):
        said = ", ".join(f"{name}={given.get(name, 'missing')}" for name in RANK_VARIABLES)
        raise UserError(
            f"the launcher's environment is incomplete: {said}. Start through deepspeed or torchrun."
        ) from None


def remember_line(start: Sequence[str], script: str, arguments: Sequence[str]) -> None:
    """Let the ranks that this launcher will start know how it was started."""
    os.environ[_LINE_VARIABLE] = shlex.join([*start, shown_path(REPO_ROOT / "scripts" / script), *arguments])


def remembered_line() -> dict[str, str]:
    """Return the variable of `remember_line`, for ranks on other machines; empty without."""
    return {name: os.environ[name] for name in (_LINE_VARIABLE,) if name in os.environ}


def line_to_go_on(run_name: str, otherwise: Sequence[str]) -> str:
    """Return the line that goes on with a run: as it was typed for our launcher, or another one, and two flags."""
    words = shlex.split(os.environ.get(_LINE_VARIABLE, "")) or otherwise
    flags, pairs = ("--run-name", "--resume"), zip(["", *words], words, strict=False)
    kept = [word for before, word in pairs if before not in flags and word.partition("=")[0] not in flags]
    return shlex.join([*kept, f"--run-name={run_name}", "--resume=auto"])


def environment_for_ranks() -> dict[str, str]:
    """Return the environment for a launcher that this process starts.

    Raises:
        UserError: if this process is itself a rank that a launcher started, or in one of several pods.
    """
    environment = dict(os.environ)
    if environment.get("MASTER_PORT") == PORT_OF_NONE:  # another thread trains, alone, in this process
        for name in (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
    if "LOCAL_RANK" not in environment:  # a job of one pod
        refuse_a_pod_alone(environment)
        environment = {name: value for name, value in environment.items() if name not in RANK_VARIABLES}
    if "RANK" in environment:
        raise UserError("gpus: this process is a rank already, and its launcher has started the others: leave it out.")
    return environment


def adopt_rank() -> None:
    """Give a process of mpirun or srun torchrun's variables, by which PyTorch, DeepSpeed and we know the ranks.

    Does nothing if they are set, or if the process is the only one.

    Raises:
        UserError: if several processes were started or asked for, and this one cannot know its rank or the others.
    """
    refuse_a_pod_alone(os.environ)
    if os.environ.get("RANK") == "0" and os.environ.get("WORLD_SIZE") == "1":  # a job of one pod
        os.environ.setdefault("LOCAL_RANK", "0")
    if any(name in os.environ for name in RANK_VARIABLES):
        return
    from_mpirun = _numbers_of_mpirun()
    numbers = from_mpirun or _numbers_of_srun()
    if numbers is None:
        _refuse_a_single_process()
        return
    size, local_size = numbers[2:]
    host = "127.0.0.1" if local_size == size else "" if from_mpirun else _first_host()
    port = _DEFAULT_PORT if from_mpirun else job_port(_number("SLURM_JOB_ID"))
    place = {"MASTER_ADDR": os.environ.get("MASTER_ADDR") or host, "MASTER_PORT": os.environ.get("MASTER_PORT") or port}
    if not place["MASTER_ADDR"]:
        raise UserError(
            f"{size} processes on several machines, and MASTER_ADDR is missing: give it rank 0's host, with "
            "mpirun -x MASTER_ADDR=HOST (Open MPI) or mpirun -genv MASTER_ADDR HOST (MPICH)."
        )
    names = (*RANK_VARIABLES, "LOCAL_WORLD_SIZE")
    os.environ |= {name: str(value) for name, value in (*zip(names, numbers, strict=True), *place.items())}


def refuse_a_pod_alone(environment: Mapping[str, str], flags: Sequence[str] = ("...",)) -> None:
    """Refuse to train here alone if the variables say that this is one of several pods, each a node of one training.

    Kubeflow's PyTorchJob sets RANK and WORLD_SIZE in each pod, the latter times the ranks of a pod if it is told them,
    and no LOCAL_RANK; its newer versions, and TrainJob, the defaults of torchrun's flags, PET_*.

    Args:
        environment: the variables.
        flags: of the training entry, for the command that the message names.

    Raises:
        UserError: if it is one of several.
    """
    pods = environment.get("PET_NNODES") or (environment.get("WORLD_SIZE") if "RANK" in environment else "") or "1"
    if "LOCAL_RANK" in environment or pods.rpartition(":")[2] in ("0", "1"):  # '1:4' are 1 to 4
        return
    names = [name for name in _POD_VARIABLES if name in environment]
    places = {
        "--nnodes": pods,
        "--node_rank": environment.get("PET_NODE_RANK") or environment.get("RANK", "0"),
        "--nproc_per_node": environment.get("PET_NPROC_PER_NODE") or "GPUS",
        "--master_addr": environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR") or "POD_0",
        "--master_port": environment.get("PET_MASTER_PORT") or environment.get("MASTER_PORT") or _DEFAULT_PORT,
    }
    command = shlex.join(["torchrun", *(f"{flag}={value}" for flag, value in places.items())])
    said = ", ".join(f"{name}={environment[name]}" for name in names)
    raise UserError(
        f"{said}, but no LOCAL_RANK: this is one of several pods, and each would train alone. Type {command} "
        f"scripts/train_distributed.py {shlex.join(flags)} in each (docs/cluster.md, Kubernetes); to train in this one "
        f"alone, unset {' '.join(names)}."
    )


def job_port(job: int) -> int:
    """Return a Slurm job's own port: jobs of one user, and tasks of one array, may share a node."""
    return _FIRST_JOB_PORT + job % _JOB_PORTS


def _numbers_of_mpirun() -> tuple[int, ...] | None:
    """Return the numbers of `_MPIRUN_VARIABLES`; None if mpirun has not started several processes."""
    for names in _MPIRUN_VARIABLES:
        numbers = tuple(map(_number, names))
        if numbers[2] > 1 and min(numbers) >= 0:
            return numbers
    return None


def _numbers_of_srun() -> tuple[int, ...] | None:
    """Return the same from Slurm's variables for the tasks of one srun."""
    # Not SLURM_NTASKS, which is also set in the shell of a job; a pseudo-terminal is an interactive shell's.
    size, node = _number("SLURM_STEP_NUM_TASKS"), _number("SLURM_NODEID")
    # '2(x3),1' are 2 tasks on each of 3 nodes, and 1 on the fourth.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(count) for count, times in groups for _ in range(int(times or 1))]
    if size < 2 or not 0 <= node < len(tasks) or "SLURM_PTY_PORT" in os.environ:
        return None
    return _number("SLURM_PROCID"), _number("SLURM_LOCALID"), size, tasks[node]


def _first_host() -> str:
    """Return the first node of an srun, which has rank 0: gpu03 of 'gpu[03-05,9],cpu1'."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).split(",")[0]


def _refuse_a_single_process() -> None:
    """Raise a UserError if several ranks were requested, but this process would train on its own."""
    sizes = [("mpirun", names[2]) for names in _MPIRUN_VARIABLES]
    if "SLURM_PTY_PORT" not in os.environ:
        sizes.insert(0, ("srun", "SLURM_STEP_NUM_TASKS"))
    for launcher, name in sizes:
        if (size := _number(name)) > 1:
            raise UserError(f"{launcher} started {size} processes, and each would train on its own. {_WAYS}")
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ:
        raise UserError(
            "accelerate was asked for several processes and started one on its own: give it --multi_gpu, which starts "
            f"them on CPUs too, in place of --cpu. {_WAYS}"
        )


def _number(name: str) -> int:
    """Return a variable's value, -1 if it is missing or not a number."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else -1
