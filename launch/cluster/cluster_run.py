"""Trains on several nodes: starts an agent on each, leads them, and starts again after a failure.

    python launch/cluster/cluster_run.py --remote-shell ssh --hosts node01,node02 --ranks-per-node 8 \\
        -- --model-type mobilenet --strategy ddp --epochs 50

launch_multi_node.sh and slurm_job.py start it so, and launch_multi_node.sh --help explains the exit codes. The ranks
are started by launch/node_run.py on every node, as on a single machine. SIGINT, SIGTERM, SIGHUP (which the ranks get
as SIGTERM) and SIGUSR1 reach the ranks of all nodes; a second SIGINT ends them. Where this process is killed, the
agents see their connection end and let the ranks save and stop.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch.cluster.cluster_plan import LAUNCHERS, Plan, forwarded_environment
from launch.cluster.cluster_start import ClusterStart
from launch.cluster.nodes import SHELLS
from launch.hostfile import check_host_name
from launch.node_run import PASSED_ON
from launch.restart_policy import RestartPolicy, Started, start_until_done
from training.command_line import parse_args
from training.config import REPO_ROOT
from training.errors import USER_ERROR_EXIT_CODE, UserError
from training.observe.environment import software


def main() -> int:
    """Lead the launch that the command line asks for; return its exit code once no rank is left."""
    try:
        plan, given = _parse()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    received: list[int] = []
    for heard in PASSED_ON:
        if signal.getsignal(heard) != signal.SIG_IGN:  # as under nohup
            signal.signal(heard, lambda number, _frame: received.append(number))
    launch_id, newest = uuid.uuid4().hex, -1

    def start(restart: int, resuming: list[str]) -> Started:
        nonlocal newest
        started = ClusterStart(plan, launch_id, received).run(restart, resuming)
        newest = max(newest, started.position)
        return started

    ending, run_name = start_until_done(start, RestartPolicy(given.max_restarts), received)
    if given.outcome:
        outcome = {"code": ending.code, "reason": ending.reason, "position": newest, "run_name": run_name}
        Path(given.outcome).write_text(json.dumps(outcome))
    return ending.code


def _parse() -> tuple[Plan, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remote-shell", choices=SHELLS, default="ssh", help="what starts the agents")
    parser.add_argument("--hosts", required=True, help="names of the nodes, with commas, that of rank 0 first")
    parser.add_argument("--ranks-per-node", type=int, required=True, help="GPUs, or CPU ranks, on each")
    parser.add_argument("--min-nodes", type=int, default=0, help="nodes with which training may go on (default: all)")
    parser.add_argument("--port", type=int, default=0, help="port that the ranks meet on (default: a free one)")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="direct", help="what starts the ranks of a node")
    parser.add_argument("--max-restarts", type=int, default=3, help="restarts in a row without a newer checkpoint")
    parser.add_argument("--stop-timeout", type=float, default=300, help="seconds the ranks have to save and stop")
    parser.add_argument(
        "--start-timeout", type=float, default=300, help="seconds within which enough nodes must answer"
    )
    parser.add_argument(
        "--allow-differences", action="store_true", help="train although versions or code differ between machines"
    )
    parser.add_argument("--forward", default="", help="names of more variables that the ranks need, with commas")
    parser.add_argument("--outcome", default="", help="file for a JSON record of how it ended")
    parser.add_argument("arguments", nargs="*", help="those of train_distributed.py, after --")
    given = parser.parse_args()
    hosts = [check_host_name(host) for host in given.hosts.split(",")]
    if len(set(hosts)) < len(hosts):
        raise UserError(f"--hosts {given.hosts}: a host is named twice.")
    if not 0 <= given.min_nodes <= len(hosts):
        raise UserError(f"--min-nodes {given.min_nodes}: expected a whole number from 1 to {len(hosts)}.")
    config, _ = parse_args(given.arguments)
    environment = forwarded_environment([name for name in given.forward.split(",") if name])
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    plan = Plan(
        hosts=hosts,
        ranks_per_node=given.ranks_per_node,
        min_nodes=given.min_nodes or len(hosts),
        accumulation_steps=config.gradient_accumulation_steps,
        port=given.port,
        remote_shell=given.remote_shell,
        launcher=given.launcher,
        arguments=given.arguments,
        folder=os.getcwd(),
        environment=environment,
        stop_timeout_s=given.stop_timeout,
        start_timeout_s=given.start_timeout,
        log_dir=os.path.abspath(os.path.expanduser(config.log_dir)) if config.log_dir else str(REPO_ROOT / "logs"),
        software=software(),
        allow_differences=given.allow_differences,
    )
    return plan, given


if __name__ == "__main__":
    sys.exit(main())
