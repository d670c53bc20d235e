"""The plan of a launch, made before any rank starts: arguments, configuration, strategy, hosts and software."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from zerovision.launch.arguments import LaunchArguments, check_training
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import log_folder
from zerovision.training.config import TrainConfig
from zerovision.training.config.global_batch import check_division
from zerovision.training.config.values import changed_flags
from zerovision.training.observe.environment import software
from zerovision.training.observe.new_run import refuse_existing, run_folder
from zerovision.training.world.launchers import remembered_line

# Variables of the launching shell that the ranks may need. Each machine decides for itself which GPUs a process sees.
FORWARDED_PREFIXES = (
    *("NCCL_", "GLOO_", "TORCH", "UCX_", "FI_", "IBV_", "MLX5_", "OMP_", "MKL_", "KMP_", "CUDA_", "CUBLAS_"),
    *("PYTHON", "DS_", "HF_", "TIMM_", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "LC_", "LANG"),
)
NEVER_FORWARDED = ("CUDA_VISIBLE_DEVICES", "PYTHONSTARTUP")
AUTO = "auto"
SECRET_SIGNS = ("TOKEN", "SECRET", "PASSWORD", "KEY")


@dataclass(frozen=True)
class Plan:
    """A launch on one or several nodes."""

    given: LaunchArguments
    arguments: list[str]  # of the training entry point
    config: TrainConfig  # that these arguments describe
    hosts: list[str]  # names of the nodes, rank 0's first
    shell: str  # how to reach the nodes: a key of `zerovision.launch.hosts.SHELLS`
    port: int  # on rank 0's node, at which the ranks meet; 0 for any free port
    folder: str = field(default_factory=os.getcwd)  # working directory of the ranks
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)  # identifies the launch's processes on every machine

    @cached_property
    def software(self) -> dict[str, str]:
        """The launching machine's software, or {} if the launch uses only this machine; see
        `zerovision.training.observe.environment.software`.
        """
        return {} if self.is_local else software(self.config.plugin)

    @property
    def is_local(self) -> bool:
        """Whether the launch uses only this machine."""
        return self.shell == "local"

    @property
    def prepare(self) -> dict[str, Any]:
        """The order that tells an agent to prepare a start."""
        return {
            "mark": self.mark,
            "folder": self.folder,
            "port": self.port,
            "environment": self.environment(),
            "ranks": len(self.hosts) * self.given.ranks_per_node,
            "compares": bool(self.software),
            "plugins": self.config.plugin,
        }

    @property
    def min_nodes(self) -> int:
        """The minimum number of hosts needed to continue, which can also share the global batch."""
        hosts, micro_steps = len(self.hosts), self._micro_steps(self.config)
        return next((n for n in range(self.given.min_nodes or hosts, hosts) if micro_steps % n == 0), hosts)

    @property
    def log_dir(self) -> str:
        """The folder for all logs, which all nodes share."""
        return os.path.abspath(os.path.expanduser(self.config.log_dir or log_folder()))

    def environment(self) -> dict[str, str]:
        """Return the environment variables that the ranks get in addition to those of their machine."""
        forwarded = forwarded_environment(self.given.forward_env.split(","))
        # One folder per Python environment, because torch keys its compiled operators only by name.
        extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or f"{sys.prefix}/torch_extensions"
        return forwarded | remembered_line() | {"TORCH_EXTENSIONS_DIR": extensions}

    def usable_nodes(self, reachable: int) -> int:
        """Return how many of the reachable nodes can share the global batch, or 0 if there are too few."""
        return next((n for n in range(reachable, self.min_nodes - 1, -1) if self._micro_steps(self.config) % n == 0), 0)

    def _micro_steps(self, config: TrainConfig) -> int:
        """Return the number of micro-steps per update, summed over all nodes."""
        if config.global_batch:
            return config.global_batch * config.ranks_per_replica // (self.given.ranks_per_node * config.micro_batch)
        return len(self.hosts) * config.gradient_accumulation_steps

    def batch_flags(self, nodes: int, resuming: Sequence[str] = ()) -> list[str]:
        """Return flags that preserve the global batch on this many nodes; with fewer, each runs more micro-steps."""
        if nodes == len(self.hosts) or self.config.batch_size == "auto":  # the ranks divide an automatic batch
            return []
        # `resuming`, the flags of this start, may change the number of micro-steps.
        config = check_training([*self.arguments, *resuming]) if resuming else self.config
        return [f"--gradient-accumulation-steps={self._micro_steps(config) // nodes}"]


def resolve_strategy(given: LaunchArguments, nodes: int) -> LaunchArguments:
    """Return the arguments with the planner's strategy, batch size and flags in place of `auto`, or raise a UserError.

    A batch size of `auto` is kept, unless the planner recommends a smaller batch than it had assumed for `auto`.
    """
    if given.positional["strategy"] != AUTO:
        if given.gpu:
            raise UserError(f"--gpu is only for the strategy {AUTO}: leave it out.")
        return given
    from zerovision.planning.machines import PlanSettings
    from zerovision.planning.plan_command import job_of  # imports torch
    from zerovision.planning.recommend import reason, recommend

    ranks = given.ranks_per_node
    words = [f"--num-gpus={nodes * ranks}", f"--gpus-per-node={ranks}", *([f"--gpu={given.gpu}"] if given.gpu else [])]
    training = [word for word in given.training if word != f"--strategy={AUTO}"]
    job, _ = job_of(PlanSettings.read(["--with-data", *words, *training]))
    option, rungs = recommend(job)
    best = option.config
    flags = changed_flags(best, job.config)
    chosen = " ".join([best.strategy, *flags])
    print(f"strategy auto: {chosen}: {reason(job, option, rungs)}", file=sys.stderr, flush=True)
    positional = given.positional | {"strategy": best.strategy}
    if (positional["batch_size"], best.batch_size) != (AUTO, job.config.batch_size):  # otherwise the ranks determine it
        positional["batch_size"] = str(best.batch_size)
        flags = [*flags, f"--gradient-accumulation-steps={best.gradient_accumulation_steps}"]
    return replace(given, positional=positional, flags=[*given.flags, *flags], gpu="")


def check_new_run(config: TrainConfig, possible_ranks: Sequence[int]) -> None:
    """Raise a UserError for a run name in use, or for a global batch that no possible number of ranks can share.

    The requested number of ranks comes first. A resumed run keeps its checkpoint's global batch, which the ranks check.
    """
    folder = run_folder(config)
    if config.run_name:
        refuse_existing(config, folder)
    if config.resume not in ("never", "auto") or (config.resume == "auto" and folder.has_checkpoint):
        return
    wanted, *fewer = possible_ranks
    for ranks in fewer:
        with contextlib.suppress(UserError):
            check_division(config, ranks)
            return
    check_division(config, wanted)  # its error, because it is the requested number


def forwarded_environment(names: Sequence[str]) -> dict[str, str]:
    """Return this process's environment variables that ranks on other machines need, and the variables in `names`."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in names
        or (
            name.startswith(FORWARDED_PREFIXES)
            and name not in NEVER_FORWARDED
            and not any(sign in name for sign in SECRET_SIGNS)  # srun transmits variables in clear text
        )
    }
