"""What a launch on several nodes is to start, and the command that each node runs for it."""

from __future__ import annotations

import base64
import json
import os
import sys
from dataclasses import dataclass

from training.config import REPO_ROOT

LAUNCH = REPO_ROOT / "launch"
ENTRY = str(REPO_ROOT / "scripts" / "train_distributed.py")
# What the ranks may need of the launching shell's variables. Which GPUs a process sees is each machine's own matter.
FORWARDED_PREFIXES = (
    *("NCCL_", "GLOO_", "TORCH", "UCX_", "FI_", "IBV_", "MLX5_", "OMP_", "MKL_", "KMP_", "CUDA_", "CUBLAS_"),
    *("PYTHON", "DS_", "HF_", "TIMM_", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "LC_", "LANG"),
)
NEVER_FORWARDED = ("CUDA_VISIBLE_DEVICES", "PYTHONSTARTUP")
SECRET_SIGNS = ("TOKEN", "SECRET", "PASSWORD", "KEY")


@dataclass(frozen=True)
class Plan:
    """A launch on several nodes.

    Attributes:
        hosts: names of the nodes, that of rank 0 first.
        ranks_per_node: ranks that each starts.
        min_nodes: with how many of the hosts training may go on.
        accumulation_steps: micro-steps per optimizer step on all hosts; on fewer of them it grows, so that the global
            batch stays.
        port: that the ranks meet on, 0 for a free one of rank 0's node.
        remote_shell: 'ssh' or 'srun'.
        launcher: what starts the ranks of a node, a key of `LAUNCHERS`.
        arguments: of the training entry.
        folder: that the ranks start in.
        environment: variables of the ranks beside those of their machine, TORCH_EXTENSIONS_DIR among them.
        stop_timeout_s: seconds the ranks have to save and leave after a signal.
        start_timeout_s: seconds within which enough nodes must answer.
        log_dir: folder of all logs, which all nodes share.
        software: of the machine that launches, see `training.observe.environment.software`.
        allow_differences: whether nodes with other software may take part.
    """

    hosts: list[str]
    ranks_per_node: int
    min_nodes: int
    accumulation_steps: int
    port: int
    remote_shell: str
    launcher: str
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    stop_timeout_s: float
    start_timeout_s: float
    log_dir: str
    software: dict[str, str]
    allow_differences: bool

    def usable_nodes(self, reachable: int) -> int:
        """Return how many of the reachable nodes can share the global batch, 0 where they are too few."""
        micro_steps = len(self.hosts) * self.accumulation_steps
        return next((n for n in range(reachable, self.min_nodes - 1, -1) if micro_steps % n == 0), 0)

    def batch_flags(self, nodes: int) -> list[str]:
        """Return the flags that keep the global batch on so many nodes."""
        if nodes == len(self.hosts):
            return []
        return [f"--gradient-accumulation-steps={len(self.hosts) * self.accumulation_steps // nodes}"]


@dataclass(frozen=True)
class Place:
    """A node among those that take part in one start."""

    hosts: list[str]
    node_rank: int
    ranks_per_node: int
    own_address: str
    master_address: str
    master_port: int
    launch_id: str


def _direct(place: Place) -> list[str]:
    return [str(LAUNCH / "local_ranks.py"), *_static_rendezvous(place)]


def _torchrun(place: Place) -> list[str]:
    return [str(LAUNCH / "torchrun.py"), *_static_rendezvous(place)]


def _torchrun_c10d(place: Place) -> list[str]:
    count, ranks = str(len(place.hosts)), str(place.ranks_per_node)
    endpoint = f"{place.master_address}:{place.master_port}"
    words = ["--nnodes", count, "--nproc_per_node", ranks, "--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint]
    # The node that has rank 0 tells the others its name: they could understand another machine by it.
    return [str(LAUNCH / "torchrun.py"), *words, "--rdzv_id", place.launch_id, "--local_addr", place.own_address]


def _deepspeed(place: Place) -> list[str]:
    """Return what `deepspeed` itself sends to each node."""
    slots = {host: list(range(place.ranks_per_node)) for host in place.hosts}
    world_info = base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()
    words = [f"--world_info={world_info}", f"--node_rank={place.node_rank}", f"--master_addr={place.master_address}"]
    words += [f"--master_port={place.master_port}", "--log_level=critical"]
    return ["-m", "deepspeed.launcher.launch", *words]


LAUNCHERS = {"direct": _direct, "deepspeed": _deepspeed, "torchrun": _torchrun, "torchrun-c10d": _torchrun_c10d}


def node_command(launcher: str, place: Place, arguments: list[str]) -> list[str]:
    """Return the command with which a node starts its ranks."""
    return [sys.executable, "-u", *LAUNCHERS[launcher](place), ENTRY, *arguments]


def forwarded_environment(names: list[str]) -> dict[str, str]:
    """Return the variables of this process that the ranks on other machines need, and those named.

    What looks like a secret goes only where it is named: srun carries it in clear text.
    """
    found = {name: os.environ[name] for name in names if name in os.environ}
    for name, value in os.environ.items():
        is_secret = any(sign in name for sign in SECRET_SIGNS)
        if name.startswith(FORWARDED_PREFIXES) and name not in NEVER_FORWARDED and not is_secret:
            found[name] = value
    return found


def _static_rendezvous(place: Place) -> list[str]:
    count, rank, ranks = str(len(place.hosts)), str(place.node_rank), str(place.ranks_per_node)
    words = ["--nnodes", count, "--node_rank", rank, "--nproc_per_node", ranks]
    return [*words, "--master_addr", place.master_address, "--master_port", str(place.master_port)]
