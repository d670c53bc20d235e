"""Trains on this machine, or on several over ssh; run by scripts/launch_distributed.sh and launch_multi_node.sh.

python zerovision/launch/launch.py launch_distributed.sh mobilenet ddp 2 16 50
python zerovision/launch/launch.py launch_multi_node.sh mobilenet ddp 2 8 16 50 --hosts node01,node02
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zerovision.launch.arguments import (
    LaunchArguments,
    check_training,
    print_command,
    read_arguments,
    run_launcher,
)
from zerovision.launch.cluster_run import ClusterRun, Hosts
from zerovision.launch.hosts import HERE, read_hostfile, split_hosts
from zerovision.launch.node_run import receive_signals
from zerovision.launch.nodes import Nodes
from zerovision.launch.plan import Plan, check_new_run, resolve_strategy
from zerovision.launch.restart_policy import Adaptation, RestartPolicy, Started, start_until_done
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import log_folder
from zerovision.training.world.launchers import refuse_a_pod_alone, remember_line


def main(words: list[str]) -> int:
    """Launch the run that a script's name, its arguments and the environment describe; return the exit code."""
    script, *arguments = words
    given = read_arguments(script, arguments, os.environ)
    is_local = "num_nodes" not in given.positional
    nodes = Nodes("local" if is_local else "ssh")
    if is_local:
        refuse_a_pod_alone(os.environ)
        if not given.dry_run:
            nodes.connect([HERE])  # its agent starts while this process checks the rest, and exits if this process does
    given = resolve_strategy(given, given.nodes)
    config = check_training(given.training)
    hosts = [HERE] if is_local else _hosts(given)
    least = given.min_nodes or given.nodes
    check_new_run(config, [nodes * given.ranks_per_node for nodes in range(given.nodes, least - 1, -1)])
    if given.dry_run:
        shown = given if is_local else replace(given, hosts=",".join(hosts), hostfile="")
        print_command(shown.command(__file__))
        return 0
    if not is_local and not shutil.which("ssh"):
        raise UserError("ssh is not installed here: install OpenSSH's client.")
    plan = Plan(given, given.training, config, hosts, "local" if is_local else "ssh", given.master_port)
    if code := preflight(plan, nodes):
        return code
    remember_line(["bash"], script, arguments)
    return train(plan, nodes, receive_signals()).ending.code


def _hosts(given: LaunchArguments) -> list[str]:
    """Return the hosts that the launch uses, rank 0's first."""
    if given.hosts:
        return split_hosts(given.hosts, given.nodes)[: given.nodes]
    default = Path("hostfile.txt")
    path = Path(given.hostfile) if given.hostfile else default if default.is_file() else log_folder().parent / default
    return list(read_hostfile(path, given.nodes, given.ranks_per_node))[: given.nodes]


def preflight(plan: Plan, nodes: Nodes) -> int:
    """Have the doctor examine the machines if --preflight was given; return its exit code, closing `nodes` after 1."""
    if not plan.given.preflight:
        return 0
    from zerovision.launch.doctor import Request, print_examination

    slots = dict.fromkeys(plan.hosts, plan.given.ranks_per_node)
    request = Request(slots, plan.shell, plan.config, has_data=True, has_training=True)
    if code := print_examination(request, nodes):
        nodes.close()
    return code


def train(plan: Plan, nodes: Nodes, received: list[int]) -> Started:
    """Start the ranks on all nodes, and restart them after every failure; return how training ended.

    SIGINT, SIGTERM, SIGHUP (as SIGTERM) and SIGUSR1 are forwarded to the ranks of all nodes; a second SIGINT kills the
    ranks. If this process is killed, the agents lose the connection and let the ranks save and stop.

    Args:
        plan: the plan of the launch.
        nodes: the agents of the launch.
        received: list to which the signal handlers append received signals.
    """
    hosts = Hosts()
    with contextlib.closing(nodes):
        return start_until_done(
            lambda restart, resuming: ClusterRun(plan, nodes, received, hosts).run(restart, resuming),
            RestartPolicy(plan.given.max_restarts),
            Adaptation(plan.arguments, len(plan.hosts) * plan.given.ranks_per_node),
            received,
        )


if __name__ == "__main__":
    run_launcher(main)
