"""The strategy word `auto`: scripts/plan.py chooses, in a process of its own, because it needs torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

from launch.arguments import LaunchArguments
from training.base.errors import UserError
from training.config import REPO_ROOT

PLANNER = str(REPO_ROOT / "scripts/plan.py")
AUTO = "auto"


def resolve_strategy(given: LaunchArguments, nodes: int) -> LaunchArguments:
    """Return the arguments with `auto` replaced by the strategy, batch size and flags that the planner recommends.

    A batch size `auto` stays, unless fewer images than that finds are recommended.

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
