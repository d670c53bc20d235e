"""The one process of a launch on each node: starts the node's ranks, watches them, and follows the launch's orders.

    python zerovision/launch/cluster/agent.py node01

The launch starts it through ssh or srun, whose stdin and stdout carry the messages: nothing listens and nothing
connects, so only ssh's keys, or Slurm, decide who may start one. Its orders are messages of these kinds:

    prepare   end what an earlier start left; answer "ready" with facts about this machine, or with what is wrong
    mark      write a file into the log folder, which is removed before the ranks start; answer "marked"
    see       answer "seen": whether the file that another node has written there appears here
    start     start the ranks; "ended" follows when no process of them is left
    signal    pass a signal on to the ranks
    end       end the ranks at once
    beat      nothing: a heartbeat

It ends its ranks by itself if it receives nothing for `LOST_SECONDS`, and lets them save when the launch is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from zerovision.launch.cluster.channel import Channel, Message
from zerovision.launch.launch_folder import HeartbeatFolder, launch_environment, launch_folder
from zerovision.launch.node_launcher import NodeLauncher, malloc_variables
from zerovision.launch.node_run import NodeRun, receive_signals
from zerovision.launch.process_tree import Launch, remove_stale_build_locks
from zerovision.training.base.atomic_write import leave_mark, sees_mark
from zerovision.training.base.control_groups import usable_cores
from zerovision.training.base.errors import UserError
from zerovision.training.base.lasting_output import outlast_readers
from zerovision.training.observe.environment import software
from zerovision.training.world.gpus import machine_gpus, visible_gpus
from zerovision.training.world.network_interfaces import (
    check_chosen_interfaces,
    free_port,
    own_addresses,
    route_towards,
)

BEAT_SECONDS = 1.0
LOST_SECONDS = 10.0  # without a sign of life the other end counts as lost; a cable out for 3 seconds costs nothing
CUT_OFF_SECONDS = 5.0  # what the ranks of a node that is cut off get to leave: they cannot agree with the others


def main() -> int:
    """Serve one start of a launch, until that closes our standard input."""
    (node,) = sys.argv[1:]  # the name that the launch knows this node by
    # The ranks print to stdout too, and must not read what is meant for the agent.
    channel = Channel(os.dup(0), os.dup(1))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    outlast_readers()
    Agent(node, channel, _reached_by()).serve()
    return 0


def _reached_by() -> str:
    """Return this machine's address on the way to the launch, as ssh or Slurm names it; '' if neither does."""
    came_in_on = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    return next(iter(came_in_on), "") or route_towards(os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))


class Agent:
    """Follows the orders of the launch, for one start."""

    def __init__(self, node: str, channel: Channel, address: str) -> None:
        """Serve `channel` as `node`, which the launch reached on `address` ('' if not known)."""
        self._node, self._channel, self._address = node, channel, address
        self._orders: queue.Queue[Message | None] = queue.Queue()
        # Signals, of the launch or of Slurm, which may send one to a single node: the ranks of all nodes agree on it.
        self._received = receive_signals()
        self._last_message = time.monotonic()
        self._is_closed = False
        self._launch = Launch()
        self._gpus = 0  # that ranks may use here
        self._node_run: NodeRun | None = None
        self._mark: Path | None = None  # that we have left in the log folder
        self._answers: dict[str, tuple[str, Callable[[Message], Message]]] = {
            "prepare": ("ready", self._prepare),
            "mark": ("marked", self._leave_mark),
            "see": ("seen", lambda order: {"is_seen": sees_mark(Path(order["mark"]), order["seconds"])}),
            "start": ("ended", self._run),
        }

    def serve(self) -> None:
        """Follow orders; return when the launch is gone, or has closed the connection."""
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()
        # It stays until the launch leaves, also after "ended": ending with a message unread would reset the connection,
        # and the launch might miss the last answer.
        while (order := self._orders.get()) is not None:
            answer, act = self._answers[order["kind"]]
            self._channel.send({"kind": answer, **act(order)})
        self._remove_mark()

    def _listen(self) -> None:
        for message in self._channel.messages(lambda _: None):
            self._last_message = time.monotonic()
            if message["kind"] == "signal":
                self._received.append(message["number"])
            elif message["kind"] == "end" and self._node_run:
                self._node_run.abandon()
            elif message["kind"] in self._answers:
                self._orders.put(message)
        self._is_closed = True
        self._leave()

    def _beat(self) -> None:
        while True:
            failing = self._node_run is not None and self._node_run.monitor.first_failure() is not None
            self._channel.send({"kind": "beat", "failing": failing})
            time.sleep(BEAT_SECONDS)

    def _watch(self) -> None:
        """Let the ranks leave if the launch is silent; a beat that cannot be sent, to a full pipe, waits elsewhere."""
        while True:
            silent_s = time.monotonic() - self._last_message
            if not self._is_closed and silent_s > LOST_SECONDS:
                self._leave()
                if silent_s > LOST_SECONDS + CUT_OFF_SECONDS and self._node_run:
                    self._node_run.abandon()
            time.sleep(BEAT_SECONDS)

    def _leave(self) -> None:
        """Let the ranks save and stop, if they can: the launch is gone."""
        self._orders.put(None)
        if not self._received:
            self._received.append(signal.SIGTERM)

    def _prepare(self, order: Message) -> Message:
        """End what an earlier start left here; return facts about this machine, or what is wrong."""
        self._launch = Launch(f"{order['mark']}-{self._node}")  # two nodes may be one machine under two names
        self._launch.kill()
        self._gpus = _count_gpus()
        remove_stale_build_locks(Path(order["environment"]["TORCH_EXTENSIONS_DIR"]))
        try:
            os.chdir(order["folder"])
            port = free_port(order["port"])
        except OSError as error:
            return {"error": f"{error.strerror}: {error.filename or 'port ' + str(order['port'])}"}
        try:
            check_chosen_interfaces({**os.environ, **order["environment"]}, has_gpus=self._gpus > 0)
        except UserError as error:
            return {"error": str(error)}
        return {
            "address": self._address,
            "addresses": own_addresses(),
            "port": port,
            "gpus": self._gpus,
            "software": software(),
        }

    def _leave_mark(self, order: Message) -> Message:
        self._remove_mark()
        try:
            self._mark = leave_mark(Path(order["folder"]))
        except OSError as error:
            return {"error": f"cannot write in {order['folder']}: {error.strerror}"}
        return {"mark": str(self._mark)}

    def _remove_mark(self) -> None:
        if self._mark:
            self._mark.unlink(missing_ok=True)
            self._mark = None

    def _run(self, order: Message) -> Message:
        """Start the node's ranks; return how they ended."""
        self._remove_mark()
        with launch_folder(self._launch) as folder, contextlib.closing(NodeLauncher()) as launcher:
            node_run = NodeRun(
                self._launch,
                launcher,
                folder,
                self._received,
                order["stop_timeout_s"],
                has_rank_0=order["has_rank_0"],
                is_alone=False,
            )
            self._node_run = node_run
            ending = node_run.run(order["command"], self._environment(order, folder))
            found = {"run_name": node_run.monitor.run_name, "position": folder.checkpoint_position()}
            return dataclasses.asdict(ending) | found

    def _environment(self, order: Message, folder: HeartbeatFolder) -> dict[str, str]:
        """Return the variables of the ranks: this machine's, the launch's, and where their heartbeats go."""
        environment = launch_environment(self._launch, folder, {**os.environ, **order["environment"]})
        cores = usable_cores()
        environment |= malloc_variables(environment, self._gpus > 0)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // order["local_size"])))
        # With ninja, which DeepSpeed needs to compile its operators.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        return environment


def _count_gpus() -> int:
    """Return how many GPUs a rank on this machine may use."""
    present = machine_gpus()
    return min(len(present), len(visible_gpus(present, os.environ.get("CUDA_VISIBLE_DEVICES"))))


if __name__ == "__main__":
    sys.exit(main())
