"""The agent that the launcher runs on each node: it starts and watches the node's ranks, and follows orders.

    python zerovision/launch/agent.py node01

The launch starts an agent locally, or through ssh or srun, in which case their stdin and stdout carry the messages.
Agents do not listen on a port, so access is controlled by ssh's keys or by Slurm. An order is a message of one of
these kinds:

    prepare   kill leftover processes of earlier starts; answer "ready" with either facts about this machine or an error
    mark      write a file into the log folder, to be removed before the ranks start; answer "mark"
    see       check whether a file that another node has written into the log folder is visible here; answer "see"
    facts, listen, reach, all-reduce   answer the doctor's question in a message of the same kind, with the result of
              machine_facts.py
    start     start the ranks; answer "ended" when all their processes have ended
    signal    forward a signal to the ranks
    end       kill the ranks immediately
    beat      do nothing: a heartbeat

When the connection closes or nothing arrives for `LOST_SECONDS`, the agent lets its ranks save and stop. If the
connection went silent, the agent also kills the ranks that are still running `CUT_OFF_SECONDS` later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zerovision.launch.node_launcher import NodeLauncher, malloc_variables
from zerovision.launch.node_run import NodeRun, receive_signals
from zerovision.launch.nodes import BEAT_SECONDS, LOST_SECONDS, Channel, Message
from zerovision.launch.process_tree import (
    HeartbeatFolder,
    LaunchProcesses,
    launch_environment,
    make_temporary_folder,
    remove_stale_build_locks,
    shell_exit_code,
)
from zerovision.training.base.control_groups import usable_cores
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import leave_mark, sees_mark
from zerovision.training.base.heartbeat import RESTARTS_VARIABLE
from zerovision.training.base.lasting_output import outlast_readers
from zerovision.training.base.run_folder import LAUNCH
from zerovision.training.observe.environment import software
from zerovision.training.world.machine import (
    check_chosen_interfaces,
    free_port,
    own_addresses,
    route_towards,
    usable_gpus,
)

CUT_OFF_SECONDS = 5.0  # time for the ranks of a node that is cut off to exit; they cannot agree with other ranks


def main() -> int:
    """Serve a launch until it closes this process's standard input."""
    # The arguments are this node's name and, if the launch runs on this machine, a file descriptor for messages.
    node, *descriptor = sys.argv[1:]
    orders = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the ranks must not read what is meant for the agent
    outlast_readers()
    if descriptor:
        os.set_inheritable(int(descriptor[0]), False)
        Agent(node, Channel(orders, int(descriptor[0])), "", math.inf).serve()
    else:
        # The address at which the launch reaches this machine, from ssh or Slurm; '' if neither provides one.
        came_in_on = os.environ.get("SSH_CONNECTION", "").split()[2:3]
        address = next(iter(came_in_on), "") or route_towards(os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))
        Agent(node, Channel(orders, os.dup(1)), address, LOST_SECONDS).serve()
    return 0


class Agent:
    """Follows the orders of the launch."""

    def __init__(self, node: str, channel: Channel, address: str, lost_s: float) -> None:
        """Act over `channel` as the agent of `node`, which the launch reached at `address` ('' if unknown).

        A launch that is silent for `lost_s` seconds is considered lost.
        """
        self._node, self._channel, self._address, self._lost_s = node, channel, address, lost_s
        self._orders: queue.Queue[Message | None] = queue.Queue()
        # Slurm may also send signals, perhaps to a single node only; the ranks of all nodes then agree to stop.
        self._received = receive_signals()
        self._last_message = time.monotonic()
        self._is_closed = False
        self._launch = LaunchProcesses()
        self._launcher = NodeLauncher()
        self._at_end = contextlib.ExitStack()
        self._at_end.callback(self._remove_mark)
        self._folder: HeartbeatFolder | None = None
        self._gpus = 0  # number of GPUs that ranks may use here
        self._node_run: NodeRun | None = None
        self._examiner: Popen | None = None  # answers the doctor's questions
        self._mark: Path | None = None  # the file that this agent has left in the log folder
        self._answers: dict[str, tuple[str, Callable[[Message], Message]]] = {
            "prepare": ("ready", self._prepare),
            "mark": ("mark", self._leave_mark),
            "see": ("see", lambda order: {"is_seen": sees_mark(Path(order["mark"]), order["seconds"])}),
            "start": ("ended", self._run),
            **{kind: (kind, self._find_out) for kind in ("facts", "listen", "reach", "all-reduce")},
        }

    def serve(self) -> None:
        """Follow orders until the launch is gone or has closed the connection."""
        for work in (self._listen, self._beat, self._watch):
            threading.Thread(target=work, daemon=True).start()
        # The agent keeps running until the launch disconnects, even after sending "ended". Exiting with an unread
        # message would reset the connection, and the launch might miss the last answer.
        with self._at_end, contextlib.closing(self._launcher):
            while (order := self._orders.get()) is not None:
                answer, act = self._answers[order["kind"]]
                self._channel.send({"kind": answer, **act(order)})

    def _listen(self) -> None:
        for message in self._channel.messages():
            self._last_message = time.monotonic()
            if message["kind"] == "signal":
                self._received.append(message["number"])
            elif message["kind"] == "end" and (run := self._node_run):
                run.abandon()
            elif message["kind"] in self._answers:
                self._orders.put(message)
        self._is_closed = True
        self._leave()

    def _beat(self) -> None:
        while True:
            run = self._node_run
            failing = run is not None and run.monitor.first_failure() is not None
            self._channel.send({"kind": "beat", "failing": failing, **self._progress()})
            time.sleep(BEAT_SECONDS)

    def _watch(self) -> None:
        """Let the ranks save and exit if the launch goes silent; this has its own thread, because `_beat` may block."""
        while True:
            silent_s = time.monotonic() - self._last_message
            if not self._is_closed and silent_s > self._lost_s:
                self._leave()
                if silent_s > self._lost_s + CUT_OFF_SECONDS and (run := self._node_run):
                    run.abandon()
            time.sleep(BEAT_SECONDS)

    def _leave(self) -> None:
        """Let the ranks save and stop if they can, because the launch is gone."""
        self._orders.put(None)
        if not self._received:
            self._received.append(signal.SIGTERM)

    def _prepare(self, order: Message) -> Message:
        """Kill processes left over from an earlier start; return facts about this machine, or an error."""
        self._launch.mark = f"{order['mark']}-{self._node}"  # two node names may refer to the same machine
        self._launch.kill(spared_pid=self._launcher.pid)
        if self._examiner and self._examiner.poll() is None:
            self._examiner.communicate()
        self._gpus = len(usable_gpus())
        remove_stale_build_locks(Path(order["environment"]["TORCH_EXTENSIONS_DIR"]))
        try:
            os.chdir(order["folder"])
            port = free_port(order["port"])
            if order["ranks"] > 1:
                check_chosen_interfaces({**os.environ, **order["environment"]}, has_gpus=self._gpus > 0)
            if not self._folder:
                self._folder = make_temporary_folder(self._launch.mark)
                self._at_end.callback(shutil.rmtree, self._folder.path, ignore_errors=True)
        except OSError as error:
            taken = f"port {order['port']} is in use: choose another one, or leave it out to use a free one"
            return {"error": f"{error.strerror}: {error.filename}" if error.filename else taken}
        except UserError as error:
            return {"error": str(error).rstrip(".")}
        return {
            "address": self._address,
            "addresses": own_addresses(),
            "port": port,
            "gpus": self._gpus,
            "cores": usable_cores(),
            "software": software(order["plugins"]) if order["compares"] else {},
        }

    def _find_out(self, order: Message) -> Message:
        """Have a separate process answer the doctor, because its imports take memory and set variables."""
        if self._examiner is None:
            command = [sys.executable, "-u", str(LAUNCH / "machine_facts.py"), self._node]
            self._examiner = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True)
            self._at_end.callback(self._examiner.kill)
        assert self._examiner.stdout
        with contextlib.suppress(BrokenPipeError):  # if it was killed, it also gives no answer
            print(json.dumps(order), file=self._examiner.stdin, flush=True)
        if not (answer := self._examiner.stdout.readline()):
            sys.exit(shell_exit_code(self._examiner.wait()))
        return {"address": self._address, **json.loads(answer)}

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

    def _run(self, order: Message) -> Message:
        """Start the node's ranks; return how they ended."""
        self._remove_mark()
        assert self._folder
        self._folder.clear()
        self._node_run = NodeRun(self._launch, self._launcher, self._folder, self._received, order["stop_timeout_s"])
        # The ranks' variables: this machine's and the launch's, plus the folder for heartbeats.
        environment = launch_environment(self._launch, self._folder, {**os.environ, **order["environment"]})
        restart = order["environment"][RESTARTS_VARIABLE]
        if restart != "0":  # a killed compiler may have left an incomplete library
            environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{self._folder.path}/compiled-{restart}")
        environment |= malloc_variables(environment, self._gpus > 0)
        # Running more threads than cores is far slower: 2 ranks with 2 threads each on 2 cores took 15 times as long.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // order["local_size"])))
        # This folder contains ninja, which compiles an engine's operators.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        ending = self._node_run.run(order["command"], environment)
        progress, self._node_run = self._progress(), None
        return dataclasses.asdict(ending) | progress

    def _progress(self) -> Message:
        """Return the run's name and newest checkpoint position for a restart; '' and -1 if no ranks are running."""
        if self._node_run is None or self._folder is None:
            return {"run_name": "", "position": -1}
        return {"run_name": self._folder.run_name(), "position": self._folder.checkpoint_position()}


if __name__ == "__main__":
    sys.exit(main())
