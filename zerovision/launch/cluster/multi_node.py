"""Trains on several machines over ssh: what scripts/launch_multi_node.sh hands over to, with its arguments.

python zerovision/launch/cluster/multi_node.py mobilenet ddp 2 8 16 50 --hosts node01,node02
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from zerovision.launch.arguments import (
    LaunchArguments,
    check_training,
    print_command,
    read_arguments,
    run_launcher,
    run_preflight,
)
from zerovision.launch.before_start import check_new_run, resolve_strategy
from zerovision.launch.cluster.cluster_run import ClusterRun
from zerovision.launch.cluster.hosts import read_hostfile, split_hosts
from zerovision.launch.cluster.plan import Plan
from zerovision.launch.cluster.rendezvous import Hosts
from zerovision.launch.node_run import receive_signals
from zerovision.launch.restart_policy import Adaptation, RestartPolicy, Started, start_until_done
from zerovision.training.base.errors import UserError
from zerovision.training.base.places import log_folder
from zerovision.training.world.launchers import remember_line


def main(arguments: list[str]) -> int:
    """Train as the arguments and the environment say; return the exit code once no rank is left."""
    given = read_arguments("launch_multi_node.sh", arguments, os.environ)
    hosts = _hosts(given)
    given = resolve_strategy(given, given.nodes)
    config = check_training(given.training)
    least = given.min_nodes or given.nodes
    check_new_run(config, [nodes * given.ranks_per_node for nodes in range(given.nodes, least - 1, -1)])
    if given.dry_run:
        print_command(replace(given, hosts=",".join(hosts), hostfile="").command(__file__))
        return 0
    if code := run_preflight(given, given.training, f"--hosts={','.join(hosts)}"):
        return code
    if not shutil.which("ssh"):
        raise UserError("ssh is not installed here: install OpenSSH's client.")
    remember_line(["bash"], given.script, arguments)
    plan = Plan(given, given.training, config, hosts, "ssh", given.master_port)
    return train(plan, given.max_restarts, receive_signals()).ending.code


def _hosts(given: LaunchArguments) -> list[str]:
    """Return the hosts that the launch uses, that of rank 0 first."""
    if given.hosts:
        return split_hosts(given.hosts, given.nodes)[: given.nodes]
    default = Path("hostfile.txt")
    path = Path(given.hostfile) if given.hostfile else default if default.is_file() else log_folder().parent / default
    return list(read_hostfile(path, given.nodes, given.ranks_per_node))[: given.nodes]


def train(plan: Plan, max_restarts: int, received: list[int]) -> Started:
    """Start the ranks on all nodes, and again after every failure; return how it ended.

    SIGINT, SIGTERM, SIGHUP (which the ranks get as SIGTERM) and SIGUSR1 reach the ranks of all nodes; a second SIGINT
    ends them. If this process is killed, the agents lose their connection and let the ranks save and stop.

    Args:
        plan: what to start.
        max_restarts: restarts allowed in a row without a newer checkpoint.
        received: the list to which the signal handlers append.
    """
    launch_id, hosts = uuid.uuid4().hex, Hosts()
    return start_until_done(
        lambda restart, resuming: ClusterRun(plan, launch_id, received, hosts).run(restart, resuming),
        RestartPolicy(max_restarts),
        # Of clusters without GPUs it may ask for an offload that saves nothing.
        Adaptation(plan.arguments, len(plan.hosts) * plan.given.ranks_per_node, has_gpus=True),
        received,
    )


if __name__ == "__main__":
    run_launcher(main)
