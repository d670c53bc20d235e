"""What a launch on several nodes starts: built from the launcher's arguments and the training's configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from launch.arguments import LaunchArguments
from launch.process_tree import extensions_folder
from training.config import REPO_ROOT, TrainConfig
from training.observe.environment import software

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
        remote_shell: 'ssh' or 'srun'.
        ranks_per_node: ranks that each starts.
        min_nodes: number of hosts that training can go on with.
        accumulation_steps: micro-steps per optimizer step on all hosts; on fewer of them it grows, so that the global
            batch stays.
        port: that the ranks meet on, 0 for a free one of rank 0's node.
        arguments: of the training entry.
        folder: current folder of the ranks.
        environment: variables of the ranks beside those of their machine, TORCH_EXTENSIONS_DIR among them.
        stop_timeout_s: seconds the ranks have to save and leave after a signal.
        start_timeout_s: seconds within which enough nodes must answer.
        log_dir: folder of all logs, which all nodes share.
        software: of the machine that launches, see `training.observe.environment.software`.
        allow_differences: whether nodes with other software may take part.
    """

    hosts: list[str]
    remote_shell: str
    ranks_per_node: int
    min_nodes: int
    accumulation_steps: int
    port: int
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    stop_timeout_s: float
    start_timeout_s: float
    log_dir: str
    software: dict[str, str]
    allow_differences: bool

    @classmethod
    def of(
        cls,
        given: LaunchArguments,
        arguments: list[str],
        config: TrainConfig,
        hosts: list[str],
        remote_shell: str,
        port: int,
    ) -> Plan:
        """Build it from the launcher's arguments, and those of the training entry with what they configure."""
        environment = forwarded_environment(given.forward_env.split(","))
        return cls(
            hosts=hosts,
            remote_shell=remote_shell,
            ranks_per_node=given.ranks_per_node,
            min_nodes=given.min_nodes or len(hosts),
            accumulation_steps=config.gradient_accumulation_steps,
            port=port,
            arguments=arguments,
            folder=os.getcwd(),
            environment=environment | {"TORCH_EXTENSIONS_DIR": extensions_folder()},
            stop_timeout_s=given.stop_timeout,
            start_timeout_s=given.start_timeout,
            log_dir=os.path.abspath(os.path.expanduser(config.log_dir or REPO_ROOT / "logs")),
            software=software(),
            allow_differences=given.allow_differences,
        )

    def usable_nodes(self, reachable: int) -> int:
        """Return how many of the reachable nodes can share the global batch, 0 if they are too few."""
        micro_steps = len(self.hosts) * self.accumulation_steps
        return next((n for n in range(reachable, self.min_nodes - 1, -1) if micro_steps % n == 0), 0)

    def batch_flags(self, nodes: int) -> list[str]:
        """Return the flags that keep the global batch on this many nodes."""
        if nodes == len(self.hosts):
            return []
        return [f"--gradient-accumulation-steps={len(self.hosts) * self.accumulation_steps // nodes}"]


def forwarded_environment(names: Sequence[str]) -> dict[str, str]:
    """Return the variables of this process that the ranks on other machines need, and those named.

    What looks like a secret is sent only if it is named: srun carries it in clear text.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name in names
        or (
            name.startswith(FORWARDED_PREFIXES)
            and name not in NEVER_FORWARDED
            and not any(sign in name for sign in SECRET_SIGNS)
        )
    }
