"""What is settled before any rank starts: the strategy word `auto`, and whether a new run can begin."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence

from zerovision.launch.arguments import LaunchArguments
from zerovision.training.base.errors import UserError
from zerovision.training.base.places import ENTRIES
from zerovision.training.config import TrainConfig
from zerovision.training.config.global_batch import check_division
from zerovision.training.observe.new_run import refuse_existing, run_folder

PLANNER = str(ENTRIES / "plan.py")
AUTO = "auto"


def resolve_strategy(given: LaunchArguments, nodes: int) -> LaunchArguments:
    """Return the arguments with `auto` replaced by the strategy, batch size and flags that the planner recommends.

    The planner is a process of its own, because it needs torch. A batch size `auto` stays, unless fewer images than
    that finds are recommended.

    Args:
        given: arguments of the launcher.
        nodes: machines of the run.

    Raises:
        UserError: for --gpu beside another strategy.
        SystemExit: if the planner refuses, after it has said why.
    """
    if given.positional["strategy"] != AUTO:
        if given.gpu:
            raise UserError(f"--gpu is for the strategy {AUTO}, which plans for it: leave it out.")
        return given
    ranks = given.ranks_per_node
    words = [f"--num-gpus={nodes * ranks}", f"--gpus-per-node={ranks}", *([f"--gpu={given.gpu}"] if given.gpu else [])]
    training = [word for word in given.training if word != f"--strategy={AUTO}"]
    planned = subprocess.run(
        [sys.executable, PLANNER, "--json", "--with-data", *words, *training], stdout=subprocess.PIPE, text=True
    )
    if planned.returncode:
        sys.exit(planned.returncode)
    plan = json.loads(planned.stdout)
    best = plan["recommended"]
    chosen = " ".join([best["strategy"], *best["changed_flags"]])
    print(f"strategy auto: {chosen}: {best['reason']}", file=sys.stderr, flush=True)
    flags, steps = best["changed_flags"], f"--gradient-accumulation-steps={best['gradient_accumulation_steps']}"
    positional = given.positional | {"strategy": best["strategy"]}
    if (positional["batch_size"], best["batch_size"]) != (AUTO, plan["batch_size"]):  # else the ranks find it
        positional["batch_size"], flags = str(best["batch_size"]), [*flags, steps]
    return dataclasses.replace(given, positional=positional, flags=[*given.flags, *flags], gpu="")


def check_new_run(config: TrainConfig, possible_ranks: Sequence[int]) -> None:
    """Refuse a run whose name another one has, and a global batch that the ranks cannot share.

    A run that goes on keeps the global batch of its checkpoint: that is for the ranks to check, which read it.

    Args:
        config: of the training.
        possible_ranks: numbers of ranks that the launch may use, the wanted one first.

    Raises:
        UserError: for the batch what the wanted number of ranks says, if no number can share it.
    """
    folder = run_folder(config)
    if config.run_name:
        refuse_existing(config, folder)
    if config.resume not in ("never", "auto") or (config.resume == "auto" and folder.has_checkpoint):
        return
    errors = []
    for ranks in possible_ranks:
        try:
            check_division(config, ranks)
        except UserError as error:
            errors.append(error)
        else:
            return
    raise errors[0]
