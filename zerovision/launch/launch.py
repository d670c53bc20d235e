"""Trains on this machine, or on several over ssh; run by scripts/launch_distributed.sh and launch_multi_node.sh.

python zerovision/launch/launch.py launch_distributed.sh mobilenet ddp 2 16 50
python zerovision/launch/launch.py launch_multi_node.sh mobilenet ddp 2 8 16 50 --hosts node01,node02
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zerovision.launch.arguments import ENTRY, check_training, print_command, read_arguments, run_launcher
from zerovision.launch.hosts import HERE, read_hostfile, split_hosts
from zerovision.launch.node_launcher import local_ranks_command
from zerovision.launch.node_run import (
    DEAD_RANK_SECONDS,
    FINAL_CODES,
    HANG_CODE,
    PASSED_ON,
    REPEAT_SECONDS,
    Ending,
    receive_signals,
)
from zerovision.launch.nodes import Message, Node, Nodes
from zerovision.launch.plan import Plan, check_new_run, resolve_strategy
from zerovision.launch.process_tree import KILL_SECONDS
from zerovision.launch.rank_monitor import STOP_CODES
from zerovision.launch.rendezvous import NO_NODES_CODE, CannotStart, Rendezvous, Roster, next_rendezvous, unfit_hosts
from zerovision.launch.restart_policy import NODES_BACK_CODE, RestartPolicy, Started, start_until_done
from zerovision.training.base.control_groups import quota_note, usable_cores
from zerovision.training.base.errors import UserError
from zerovision.training.base.heartbeat import RESTARTS_VARIABLE, RUN_ID_VARIABLE
from zerovision.training.base.run_folder import log_folder
from zerovision.training.base.units import cpu_ranks, plural
from zerovision.training.world.launchers import refuse_a_pod_alone, remember_line

LOOK_SECONDS = 0.1
OTHER_NODES_SECONDS = 30.0  # time for the other nodes to exit once one node has ended the way all nodes should
RETURN_SECONDS = 30.0  # between two attempts to reach a host that the current start runs without


@dataclass
class Hosts:
    """What a launch remembers about its hosts from one start to the next."""

    returns: Counter[str] = field(default_factory=Counter)  # times that each host has rejoined a running job
    hangs: Counter[str] = field(default_factory=Counter)  # times that a rank on each host has caused a hang
    doubtful: set[str] = field(default_factory=set)  # left out by the next start if possible


class ClusterRun:
    """One start of the ranks on all nodes, from the first connection to the last."""

    def __init__(self, plan: Plan, nodes: Nodes, received: list[int], hosts: Hosts) -> None:
        """Prepare a start; signal handlers append received signals to `received`."""
        self._plan, self._nodes, self._received, self._hosts = plan, nodes, received, hosts
        self._taking_part: list[Node] = []
        self._first_reason = ""  # why the first lost node was lost
        self._sent = 0
        self._absent: Roster | None = None  # hosts that this start runs without and keeps trying to reach
        self._back: list[str] = []  # hosts that have returned; the ranks were stopped to let them rejoin
        self._deadline = math.inf

    def run(self, restart: int, resuming: list[str]) -> Started:
        """Start the ranks (see `start_until_done`); return when no rank is running on any reachable node."""
        try:
            doubtful, self._hosts.doubtful = self._hosts.doubtful, set()
            rendezvous = next_rendezvous(self._nodes, self._plan, self._received, doubtful, is_restart=restart > 0)
            if rendezvous is None:
                return Started(Ending(128 + PASSED_ON[signal.Signals(self._received[0])]), "", -1)
            self._taking_part = rendezvous.nodes
            _print_rendezvous(self._plan, rendezvous, restart)
            self._start_ranks(rendezvous, restart, resuming)
            used = [node.host for node in rendezvous.nodes]
            if absent := [host for host in self._plan.hosts if host not in used]:
                # The seconds between two attempts to reach these hosts double each time one of them returns.
                retry_s = RETURN_SECONDS * 2 ** max(self._hosts.returns[host] for host in absent)
                self._absent = Roster(self._nodes, absent, self._plan.prepare, retry_s)
            while any(node.is_working() for node in self._taking_part):
                self._look()
                time.sleep(LOOK_SECONDS)
            return self._started(rendezvous.has_gpus)
        except CannotStart as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return Started(Ending(error.exit_code, str(error)), "", -1)
        finally:
            if not self._plan.is_local:  # the local agent keeps running, with its modules imported
                self._nodes.close()

    def _start_ranks(self, rendezvous: Rendezvous, restart: int, resuming: list[str]) -> None:
        plan, count = self._plan, len(rendezvous.nodes)
        starter = local_ranks_command(plan.config.engine, rendezvous.has_gpus)
        of_this_start = {RESTARTS_VARIABLE: str(restart), RUN_ID_VARIABLE: secrets.token_hex(8)}
        for node_rank, node in enumerate(rendezvous.nodes):
            place = ["--nnodes", str(count), "--node_rank", str(node_rank)]
            place += ["--nproc_per_node", str(plan.given.ranks_per_node), f"--stop_timeout={plan.given.stop_timeout}"]
            place += ["--master_addr", rendezvous.addresses[0], "--master_port", str(rendezvous.port)]
            arguments = [*plan.arguments, *resuming, *plan.batch_flags(count, resuming)]
            node.send(
                "start",
                command=[*starter, *place, ENTRY, *arguments],
                environment={**rendezvous.environment(node_rank), **plan.environment(), **of_this_start},
                local_size=plan.given.ranks_per_node,
                stop_timeout_s=plan.given.stop_timeout,
            )

    def _look(self) -> None:
        """Send heartbeats, forward a signal, and kill ranks that do not exit on their own."""
        now = time.monotonic()
        self._nodes.beat()
        if self._received and not self._sent:
            self._sent = PASSED_ON[signal.Signals(self._received[0])]
            for node in self._taking_part:
                node.send("signal", number=self._sent)
            name = signal.Signals(self._sent).name
            print(f"{name}: all ranks save and stop; press Ctrl-C to stop without saving", file=sys.stderr, flush=True)
            time.sleep(REPEAT_SECONDS)
            self._received.clear()
        elif self._absent and not self._sent and not self._back:
            self._bring_back(self._absent)
        elif self._sent and signal.SIGINT in self._received:
            self._deadline = now
        if self._note_losses():
            self._deadline = min(self._deadline, now)  # the other nodes cannot continue without the lost node
        self._deadline = min(self._deadline, now + self._seconds_left())
        if now > self._deadline:
            for node in filter(Node.is_working, self._taking_part):
                node.end(within_s=KILL_SECONDS)

    def _note_losses(self) -> bool:
        """Remember why the first lost node was lost; return whether any node was lost."""
        reasons = [reason for node in self._taking_part if (reason := node.lost())]
        self._first_reason = self._first_reason or next(iter(reasons), "")
        return bool(reasons)

    def _seconds_left(self) -> float:
        """Return how many seconds the nodes that are still running have left to exit on their own."""
        endings = [node.messages["ended"] for node in self._taking_part if "ended" in node.messages]
        others = self._taking_part if len(self._taking_part) > 1 else []
        failing = any(node.messages.get("beat", {}).get("failing") for node in others if node.is_working())
        if failing or any(not ended["is_final"] or ended["code"] == 2 for ended in endings):
            return DEAD_RANK_SECONDS + 1  # a second longer than a node waits after one of its own ranks has died
        return OTHER_NODES_SECONDS if endings else math.inf

    def _bring_back(self, absent: Roster) -> None:
        """Make the ranks save and stop if hosts have returned and the next start can use more nodes."""
        absent.look()
        used, back = [node.host for node in self._taking_part], absent.ready
        if absent.seconds < absent.retry_s or self._plan.usable_nodes(len(used + back)) <= len(used):
            return
        unfit, _ = unfit_hosts(self._nodes, self._plan, used + back, is_restart=True)
        if unfit:
            absent.leave_out({host: unfit[host] for host in back if host in unfit})
            return
        self._back = back
        self._hosts.returns.update(back)
        print(f"{', '.join(back)} can rejoin: the ranks save first", file=sys.stderr, flush=True)
        for node in self._taking_part:
            node.send("signal", number=signal.SIGTERM)

    def _started(self, has_gpus: bool) -> Started:
        """Return how the start ended, from the last message of every node."""
        self._note_losses()
        said = [node.messages.get("ended") or node.messages.get("beat", {}) for node in self._taking_part]
        run_name = next((name for last in said if (name := last.get("run_name"))), "")
        position = max([-1, *(last.get("position", -1) for last in said)])
        ending = ending_of(self._taking_part, self._first_reason, bool(self._sent))
        for node in self._taking_part:
            if ending.hang_order and "ended" in node.messages and _node_ending(node.messages["ended"]) == ending:
                self._hosts.hangs[node.host] += 1
                if self._hosts.hangs[node.host] > 1:
                    self._hosts.doubtful = {node.host}
        if self._back and not self._sent and ending.code in STOP_CODES:
            ending = Ending(NODES_BACK_CODE, f"with {', '.join(self._back)}", is_final=False)
        return Started(ending, run_name, position, has_gpus)


def ending_of(nodes: list[Node], lost: str, was_stopped: bool) -> Ending:
    """Return how a start ended; each of its nodes, rank 0's first, has sent "ended" or is lost.

    `lost` says why the first lost node was lost, or is '' if none was. `was_stopped` says whether the ranks were sent a
    signal to stop.
    """
    endings = {node.host: _node_ending(node.messages["ended"]) for node in nodes if "ended" in node.messages}
    first = endings.get(nodes[0].host)
    if first and (first.code == 0 or len(nodes) == 1):
        return first
    final = [ending for ending in endings.values() if ending.is_final and ending.code in FINAL_CODES]
    if not was_stopped and (lost or len(final) < len(endings)):
        # The death of a launcher or a node reaches the ranks of other nodes as a signal to stop.
        final = [ending for ending in final if ending.code not in STOP_CODES]
    if final:
        return final[0]
    if lost:
        return Ending(NO_NODES_CODE, lost, is_final=was_stopped)
    by_itself = {node.host for node in nodes if not node.was_ended}
    failures = [ending for host, ending in endings.items() if ending.code and not ending.is_final and host in by_itself]
    if hung := [ending for ending in failures if ending.code == HANG_CODE and ending.hang_order]:
        return min(hung, key=lambda ending: ending.hang_order or (True, 0))
    # A node whose rank was killed by a signal is the cause; other nodes exit with 1 because they lost the connection.
    failures.sort(key=lambda ending: ending.code <= 128)
    worst = failures[0] if failures else Ending(1, "the ranks ended, but rank 0 did not report that training is done")
    return Ending(worst.code, worst.reason, is_final=was_stopped)


def _node_ending(ended: Message) -> Ending:
    """Return how a node's ranks ended, according to its message."""
    hang_order = tuple(ended["hang_order"]) if ended["hang_order"] else None
    return Ending(ended["code"], ended["reason"], ended["is_final"], hang_order)


def _print_rendezvous(plan: Plan, rendezvous: Rendezvous, restart: int) -> None:
    """Print the nodes, their interfaces and where they meet; on a single machine, print only that it has no GPU."""
    if plan.is_local:
        if not rendezvous.has_gpus and restart == 0:
            limit = f" ({note})" if (note := quota_note()) else ""
            ranks = f"{cpu_ranks(plan.given.ranks_per_node)} on {plural(usable_cores(), 'core')}{limit}"
            print(f"no GPU found: running {ranks}", file=sys.stderr, flush=True)
        return
    rows = zip(rendezvous.nodes, rendezvous.addresses, rendezvous.interfaces, strict=True)
    named = [f"{node.host} ({address}{', ' + interface if interface else ''})" for node, address, interface in rows]
    ranks = plural(plan.given.ranks_per_node, "GPU" if rendezvous.has_gpus else "CPU rank")
    nodes = plural(len(plan.hosts), "node")
    fewer = f"{len(named)} of " if len(named) < len(plan.hosts) else ""
    place = f"{rendezvous.addresses[0]}:{rendezvous.port}"
    print(f"{fewer}{nodes} x {ranks}: {', '.join(named)}; they meet on {place}", file=sys.stderr, flush=True)


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
    if is_local:
        hosts = [HERE]
    elif given.hosts:
        hosts = split_hosts(given.hosts, given.nodes)[: given.nodes]  # rank 0's first
    else:
        default = Path("hostfile.txt")
        path = Path(given.hostfile or (default if default.is_file() else log_folder().parent / default))
        hosts = list(read_hostfile(path, given.nodes, given.ranks_per_node))[: given.nodes]
    counts = range(given.nodes, (given.min_nodes or given.nodes) - 1, -1)
    check_new_run(config, [count * given.ranks_per_node for count in counts])
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

    SIGINT, SIGTERM, SIGHUP (as SIGTERM) and SIGUSR1, which handlers append to `received`, are forwarded to the ranks of
    all nodes; a second SIGINT kills the ranks. If this process is killed, the agents lose the connection and let the
    ranks save and stop.
    """
    hosts = Hosts()
    with contextlib.closing(nodes):
        return start_until_done(
            lambda restart, resuming: ClusterRun(plan, nodes, received, hosts).run(restart, resuming),
            RestartPolicy(plan.given.max_restarts),
            plan.arguments,
            len(plan.hosts) * plan.given.ranks_per_node,
            received,
        )


if __name__ == "__main__":
    run_launcher(main)
