"""What a launch on several nodes starts: the launcher's arguments, the training's configuration, and this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from zerovision.launch.arguments import LaunchArguments, check_training
from zerovision.launch.process_tree import extensions_folder
from zerovision.training.base.places import log_folder
from zerovision.training.config import TrainConfig
from zerovision.training.observe.environment import software
from zerovision.training.world.launchers import remembered_line

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
        given: the launcher's arguments.
        arguments: of the training entry.
        config: what these configure.
        hosts: names of the nodes, that of rank 0 first.
        remote_shell: 'ssh' or 'srun'.
        port: that the ranks meet on, 0 for a free one of rank 0's node.
        folder: current folder of the ranks.
        software: of the machine that launches, see `zerovision.training.observe.environment.software`.
    """

    given: LaunchArguments
    arguments: list[str]
    config: TrainConfig
    hosts: list[str]
    remote_shell: str
    port: int
    folder: str = field(default_factory=os.getcwd)
    software: dict[str, str] = field(default_factory=software)

    @property
    def min_nodes(self) -> int:
        """The number of hosts that training can go on with."""
        return self.given.min_nodes or len(self.hosts)

    @property
    def log_dir(self) -> str:
        """The folder of all logs, which all nodes share."""
        return os.path.abspath(os.path.expanduser(self.config.log_dir or log_folder()))

    def environment(self) -> dict[str, str]:
        """Return the variables of the ranks beside those of their machine."""
        forwarded = forwarded_environment(self.given.forward_env.split(","))
        return forwarded | remembered_line() | {"TORCH_EXTENSIONS_DIR": extensions_folder()}

    def usable_nodes(self, reachable: int) -> int:
        """Return how many of the reachable nodes can share the global batch, 0 if they are too few."""
        micro_steps = self._micro_steps(self.config)
        return next((n for n in range(reachable, self.min_nodes - 1, -1) if micro_steps % n == 0), 0)

    def _micro_steps(self, config: TrainConfig) -> int:
        """Return the micro-steps of an update that all nodes share."""
        if config.global_batch:
            return config.global_batch * config.ranks_per_replica // (self.given.ranks_per_node * config.micro_batch)
        return len(self.hosts) * config.gradient_accumulation_steps

    def batch_flags(self, nodes: int, resuming: Sequence[str] = ()) -> list[str]:
        """Return the flags that keep the global batch on this many nodes: more micro-steps on fewer of them.

        Args:
            nodes: that take part.
            resuming: flags of this start, which may have changed the micro-steps.
        """
        if nodes == len(self.hosts) or self.config.batch_size == "auto":  # which the ranks divide themselves
            return []
        config = check_training([*self.arguments, *resuming]) if resuming else self.config
        return [f"--gradient-accumulation-steps={self._micro_steps(config) // nodes}"]


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
