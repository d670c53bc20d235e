"""The one process of a launch on each node: starts the node's ranks, watches them, and does what the launch says.

    python launch/cluster/agent.py node01

launch/cluster/cluster_run.py starts it through ssh or srun, whose stdin and stdout carry the messages: nothing listens
and nothing connects, so ssh's keys, or Slurm's, decide who is let in. Its orders, each a message with the key "do":

    prepare   end what an earlier start left, look around, answer with "ready" or with what is wrong
    mark      write a file into the log folder, which is removed before the ranks start
    see       say whether the file that another node has written there is seen here
    start     start the ranks; "ended" follows when no process of them is left
    signal    pass a signal on to the ranks
    end       end the ranks at once
    beat      nothing: a sign of life

It ends its ranks by itself when it hears nothing for `LOST_SECONDS`, and lets them save when the launch is gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch.cluster.channel import Channel, Message
from launch.node_run import PASSED_ON, NodeRun
from launch.process_tree import MARK, Launch, remove_stale_build_locks
from launch.supervisor import RANK_VARIABLES, guard
from launch.temporary_folder import make_temporary_folder, private_variables
from training.observe.environment import software
from training.observe.heartbeat import FOLDER_VARIABLE, HeartbeatFolder
from training.observe.shared_folder import leave_mark, sees_mark
from training.parallel.network_interfaces import free_port, own_addresses, route_towards

BEAT_SECONDS = 1.0
LOST_SECONDS = 10.0  # without a sign of life the other end counts as lost; a cable out for 3 seconds costs nothing
CUT_OFF_SECONDS = 5.0  # what the ranks of a node that is cut off get to leave: they cannot agree with the others


def main() -> int:
    """Serve one start of a launch, until that closes our standard input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("node", help="name that the launch knows this node by")
    given = parser.parse_args()
    # Our ranks print to stdout too, and shall not read what is meant for us.
    channel = Channel(os.dup(0), os.dup(1))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    Agent(given.node, channel, _reached_by()).serve()
    return 0


def _reached_by() -> str:
    """Return this machine's address on the way to the launch, as ssh or Slurm names it; '' if neither does."""
    came_in_on = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    return next(iter(came_in_on), "") or route_towards(os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))


class Agent:
    """Does what the launch says, for one start."""

    def __init__(self, node: str, channel: Channel, address: str) -> None:
        """Serve `channel` as `node`, which the launch reached on `address` ('' if not known)."""
        self._node = node
        self._channel = channel
        self._address = address
        self._orders: queue.Queue[Message | None] = queue.Queue()
        self._received: list[int] = []
        self._heard = time.monotonic()
        self._is_closed = False
        self._launch = Launch()
        self._attempt: NodeRun | None = None
        self._mark: Path | None = None  # that we have left in the log folder
        self._answers: dict[str, tuple[str, Callable[[Message], Message]]] = {
            "prepare": ("ready", self._prepare),
            "mark": ("marked", self._leave_mark),
            "see": ("seen", lambda order: {"is_seen": sees_mark(Path(order["mark"]), order["seconds"])}),
            "start": ("ended", self._run),
        }

    def serve(self) -> None:
        """Prepare and start as told; return when the launch is gone, or has nothing more to say."""
        for heard in PASSED_ON:  # from Slurm, which knows nothing of the launch: the ranks of all nodes agree on it
            signal.signal(heard, lambda number, _frame: self._received.append(number))
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        # It stays until the launch leaves, also after "ended": to end with a message unread would reset the connection,
        # and the launch might miss the last answer.
        while (order := self._orders.get()) is not None:
            answer, act = self._answers[order["do"]]
            self._channel.send({"say": answer, "node": self._node, **act(order)})
        self._remove_mark()

    def _listen(self) -> None:
        for message in self._channel.messages(lambda _: None):
            self._heard = time.monotonic()
            if message["do"] == "signal":
                self._received.append(message["number"])
            elif message["do"] == "end" and self._attempt:
                self._attempt.abandon()
            elif message["do"] in self._answers:
                self._orders.put(message)
        self._is_closed = True
        self._leave()

    def _beat(self) -> None:
        while True:
            failing = self._attempt is not None and self._attempt.watch.first_failure() is not None
            self._channel.send({"say": "beat", "node": self._node, "failing": failing})
            silent_s = time.monotonic() - self._heard
            if not self._is_closed and silent_s > LOST_SECONDS:
                self._leave()
                if silent_s > LOST_SECONDS + CUT_OFF_SECONDS and self._attempt:
                    self._attempt.abandon()
            time.sleep(BEAT_SECONDS)

    def _leave(self) -> None:
        """The launch is gone: let the ranks save and stop, if they can."""
        self._orders.put(None)
        if not self._received:
            self._received.append(signal.SIGTERM)

    def _prepare(self, order: Message) -> Message:
        """End what an earlier start left here; return what the launch wants to know, or what is wrong."""
        self._launch = Launch(f"{order['mark']}-{self._node}")  # two nodes may be one machine under two names
        self._launch.kill()
        remove_stale_build_locks(Path(order["locks"]))
        try:
            os.chdir(order["folder"])
            port = free_port(order["port"])
        except OSError as error:
            return {"error": f"{error.strerror}: {error.filename or 'port ' + str(order['port'])}"}
        return {
            "address": self._address,
            "addresses": own_addresses(),
            "port": port,
            "gpus": _count_gpus(),
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
        """Run the node's launcher and its ranks; return how they ended."""
        self._remove_mark()
        folder = make_temporary_folder(self._launch.mark)
        stop_timeout_s = order["stop_timeout_s"]
        attempt = NodeRun(
            self._launch, folder, self._received, stop_timeout_s, has_rank_0=order["has_rank_0"], is_alone=False
        )
        guard_pipe = guard(self._launch, folder.path, CUT_OFF_SECONDS)
        self._attempt = attempt
        try:
            ending = attempt.run(order["command"], self._environment(order, folder))
            return {
                **dataclasses.asdict(ending),
                "run_name": attempt.watch.run_name,
                "position": folder.checkpoint_position(),
            }
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)
            os.write(guard_pipe, b"0")

    def _environment(self, order: Message, folder: HeartbeatFolder) -> dict[str, str]:
        """Return the variables of the ranks: this machine's, the launch's, and where to report."""
        given = {**os.environ, **order["environment"]}
        environment = {name: value for name, value in given.items() if name not in RANK_VARIABLES}
        cores = len(os.sched_getaffinity(0))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // order["local_size"])))
        # ninja lies there, with which DeepSpeed compiles its operators
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        environment |= private_variables(folder.path, environment)
        return environment | {MARK: self._launch.mark, FOLDER_VARIABLE: str(folder.path)}


def _count_gpus() -> int:
    """Return how many GPUs a rank on this machine may use: those of CUDA_VISIBLE_DEVICES, where it is set."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    present = sum(line.startswith("GPU ") for line in listing.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, sum(one.strip() not in ("", "-1") for one in visible.split(",")))


if __name__ == "__main__":
    sys.exit(main())
