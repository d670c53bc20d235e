"""Launches on several nodes: messages, plans, endings, and whole launches whose remote shell stays on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.kit import wait_until
from tests.unit.launching import environment, hear_ctrl_c, stub_repo
from zerovision.launch import nodes
from zerovision.launch.arguments import LaunchArguments
from zerovision.launch.hosts import srun_command, ssh_command
from zerovision.launch.launch import ending_of
from zerovision.launch.node_run import HANG_CODE, Ending
from zerovision.launch.nodes import AGENT, PASSING, Channel, Node, Nodes, Shell
from zerovision.launch.plan import Plan, forwarded_environment
from zerovision.launch.process_tree import MARK
from zerovision.launch.rendezvous import LAUNCHING, CannotStart, by_reason, differences, next_rendezvous, unshared
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import leave_mark, sees_mark
from zerovision.training.config import TrainConfig
from zerovision.training.observe.environment import software
from zerovision.training.world import machine
from zerovision.training.world.machine import address_towards, interface_of, interface_towards, is_loopback


def plan(hosts: Sequence[str], min_nodes: int = 1, ranks_per_node: int = 1, **settings: Any) -> Plan:
    ranks = {"num_gpus": str(ranks_per_node)}
    given = LaunchArguments("launch_multi_node.sh", ranks, [], dry_run=False, min_nodes=min_nodes)
    return Plan(given, [], TrainConfig(**settings), [*hosts], "ssh", 0)


def test_messages_and_what_is_printed_come_apart() -> None:
    """Whatever pieces the stream comes in."""
    reading, writing = os.pipe()
    channel = Channel(reading, writing)
    printed: list[bytes] = []
    os.write(writing, b"epoch 1 ")
    channel.send({"kind": "beat", "n": 1})
    os.write(writing, b"loss 2.0\n\x1enot json\n")
    message = json.dumps({"kind": "ended", "text": "a\nb\x1ec"}).encode()
    os.write(writing, b"x\x1e" + message[:5])
    os.write(writing, message[5:] + b"\ny")
    os.close(writing)
    messages = list(channel.messages(printed.append))
    assert messages == [{"kind": "beat", "n": 1}, {"kind": "ended", "text": "a\nb\x1ec"}]
    assert b"".join(printed) == b"epoch 1 loss 2.0\n\x1enot json\nxy"


def test_a_closed_channel_says_so() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert not Channel(0, writing).send({"kind": "beat"})
    os.close(writing)


@pytest.mark.parametrize(
    ("hosts", "accumulation", "reachable", "least", "used"),
    [
        (4, 1, 4, 1, 4),
        (4, 1, 3, 1, 2),
        (4, 3, 3, 1, 3),
        (4, 1, 3, 3, 0),
        (2, 1, 1, 1, 1),
        (6, 1, 5, 2, 3),
        (4, 1, 0, 1, 0),
    ],
)
def test_fewer_nodes_keep_the_global_batch(
    hosts: int, accumulation: int, reachable: int, least: int, used: int
) -> None:
    given = plan("abcdef"[:hosts], least, gradient_accumulation_steps=accumulation)
    assert given.usable_nodes(reachable) == used
    if 0 < used < hosts:
        (flag,) = given.batch_flags(used)
        assert int(flag.partition("=")[2]) * used == hosts * accumulation
    assert given.batch_flags(hosts) == []


@pytest.mark.parametrize(("reachable", "used"), [(3, 3), (2, 2), (1, 1), (0, 0)])
def test_fewer_nodes_divide_the_global_batch_that_is_given(reachable: int, used: int) -> None:
    given = plan("abcd", ranks_per_node=8, batch_size=16, global_batch=16 * 8 * 12)
    assert given.usable_nodes(reachable) == used
    if used:
        assert given.batch_flags(used) == [f"--gradient-accumulation-steps={12 // used}"]
    automatic = plan("abcd", ranks_per_node=8, batch_size="auto", global_batch=8 * 8 * 4)
    assert (automatic.usable_nodes(3), automatic.batch_flags(2)) == (2, [])


@pytest.mark.parametrize(
    ("min_nodes", "micro_steps", "needed"), [(3, 1, 4), (2, 1, 2), (1, 1, 1), (3, 3, 3), (0, 1, 4)]
)
def test_too_few_nodes_to_share_the_global_batch_are_not_called_enough(min_nodes, micro_steps, needed) -> None:
    given = plan("abcd", min_nodes, gradient_accumulation_steps=micro_steps)
    assert (given.min_nodes, given.usable_nodes(3)) == (needed, 3 if needed == 3 else 2 if needed <= 2 else 0)


def test_forwarded_are_what_ranks_need_and_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"NCCL_DEBUG", "TORCH_NCCL_TIMEOUT", "OMP_NUM_THREADS", "MINE"}
    others = {"HF_TOKEN", "CUDA_VISIBLE_DEVICES", "SECRET_1"}
    for name in wanted | others:
        monkeypatch.setenv(name, "1")
    found = forwarded_environment(["MINE", "ABSENT"])
    assert wanted <= found.keys()
    assert not (others | {"ABSENT", "HOME"}) & found.keys()


def test_remote_shells_get_names_of_hosts_and_fixed_words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    steering = {"SLURM_GPUS_PER_TASK", "SLURM_UNBUFFEREDIO", "SLURM_LABELIO"}
    for name in steering:
        monkeypatch.setenv(name, "1")
    words, variables = ssh_command("a", ["/x y/python", "agent.py"])
    assert words[-3:] == ["--", "a", "exec '/x y/python' agent.py"]
    assert variables is None
    words, variables = srun_command("a", ["agent.py"])
    assert words[-1] == "agent.py"
    assert words[words.index("--nodelist") + 1] == "a"
    assert {"--ntasks=1", "--gpu-bind=none"} <= set(words)
    assert not {"--unbuffered", "-u", "--pty"} & set(words)  # each gives the task a terminal
    assert variables is not None
    assert not steering & variables.keys()


def test_the_address_that_others_reach_is_found() -> None:
    addresses = [("docker0", "172.17.0.1", "255.255.0.0"), ("eth1", "10.1.2.3", "255.255.255.0")]
    assert address_towards(["127.0.1.1", "10.1.2.9"], addresses) == "10.1.2.3"
    assert address_towards(["192.168.0.1"], addresses) == "172.17.0.1"
    assert address_towards(["10.1.2.9"], []) == ""
    assert interface_of("10.1.2.3", addresses) == "eth1"
    assert interface_of("10.9.9.9", addresses) == ""
    assert all(is_loopback(one) for one in ("127.0.0.1", "127.0.1.1", "::1", ""))
    assert not any(is_loopback(address) for _, address, _ in machine.own_addresses())


def test_the_interface_towards_a_machine_is_one_that_others_reach() -> None:
    """Also where the machine's own name resolves to 127.0.1.1."""
    interfaces = {name for name, _, _ in machine.own_addresses()} or {""}
    assert interface_towards("127.0.1.1") in interfaces
    assert interface_towards("no-such-host.invalid") in interfaces
    for name, address, _ in machine.own_addresses():
        assert interface_towards(address) == name


@pytest.mark.parametrize(
    ("reason", "passing"),
    [
        ("ssh: connect to host node02 port 22: Connection refused", True),
        ("ssh: connect to host node02 port 22: No route to host", True),
        ("ssh: connect to host node02 port 22: Connection timed out", True),
        ("kex_exchange_identification: Connection closed by remote host", True),
        ("srun: error: Task launch for StepId=11.3 failed on node node02: Communication connection failure", True),
        ("srun: error: Unable to create step for job 11: Invalid account", False),
        ("root@node02: Permission denied (publickey).", False),
        ("ssh: Could not resolve hostname nodo2: Name or service not known", False),
        ("Host key verification failed.", False),
        ("bash: line 1: /repo/.venv/bin/python: No such file or directory", False),
    ],
)
def test_only_what_may_pass_is_tried_again(reason: str, passing: bool) -> None:
    assert bool(PASSING.search(reason)) == passing


def ended(code: int, *, is_final: bool = False) -> dict[str, Any]:
    return {"code": code, "reason": f"code {code}", "is_final": is_final, "hang_order": None}


def hung(was_running: bool) -> dict[str, Any]:
    return ended(HANG_CODE) | {"hang_order": [was_running, 5]}


@pytest.mark.parametrize(
    ("messages", "lost", "was_stopped", "code", "is_final"),
    [
        ([ended(0, is_final=True), ended(0, is_final=True)], "", False, 0, True),
        ([ended(0, is_final=True), None], "b is lost", False, 0, True),  # rank 0 has said that training is done
        ([ended(1), ended(137)], "", False, 137, False),  # a rank was killed, the others lost the connection to it
        ([ended(137), ended(1)], "", False, 137, False),
        ([ended(143, is_final=True), ended(137)], "", False, 137, False),  # a launcher was killed
        ([ended(143, is_final=True), ended(143, is_final=True)], "", False, 143, True),  # somebody told a rank
        ([ended(143, is_final=True), ended(143, is_final=True)], "", True, 143, True),
        ([ended(143, is_final=True), None], "b is lost", True, 143, True),
        ([ended(143, is_final=True), None], "b is lost", False, 69, False),
        ([ended(1), ended(2, is_final=True)], "", False, 2, True),
        ([ended(74, is_final=True), ended(1)], "", False, 74, True),
        ([ended(1), None], "b is lost", False, 69, False),
        ([None, ended(1)], "a is lost", False, 69, False),
        ([hung(True), None], "b is lost", False, 69, False),  # it waited for the lost one
        ([hung(True), hung(False)], "", False, HANG_CODE, False),
    ],
)
def test_how_it_ended_follows_from_the_nodes_messages(
    messages: list[dict[str, Any] | None], lost: str, was_stopped: bool, code: int, is_final: bool
) -> None:
    nodes = [
        Node(name, Channel(0, 1), messages={"ended": one} if one else {})
        for name, one in zip("ab", messages, strict=True)
    ]
    ending = ending_of(nodes, lost, was_stopped)
    assert (ending.code, ending.is_final) == (code, is_final)
    if code == HANG_CODE:
        assert ending == Ending(HANG_CODE, f"code {HANG_CODE}", False, (False, 5))


def test_a_node_that_was_ended_is_not_the_cause() -> None:
    failed, others = Node("a", Channel(0, 1), messages={"ended": ended(1)}), Node("b", Channel(0, 1))
    others.end(within_s=30)
    others.messages["ended"] = ended(137)
    assert ending_of([failed, others], "", False) == Ending(1, "code 1", False)


# Stands in for ssh: runs the remote command here, or fails as ssh does for a host named in FAKE_SSH_FAILS. On the host
# two another torch is installed, once the file ODD_SINCE is there.
FAKE_SSH = """#!/bin/bash
host=${@: -2:1}
echo "$host" >> "$STUB_FOLDER/reached"
if [[ " ${FAKE_SSH_FAILS:-} " == *" $host "* && ! -e ${UP_SINCE:-} ]]; then
    echo "ssh: connect to host $host port 22: ${FAKE_SSH_REASON}" >&2
    exit 255
fi
[[ $host != two || ! -e ${ODD_SINCE:-} ]] || export PYTHONPATH=$ODD_PATH
exec bash -c "${@: -1}"
"""
# Stands in for srun: runs the command here.
FAKE_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
    case $1 in --nodelist) shift 2 ;; *) shift ;; esac
done
exec "$@"
"""
FAKES = {"ssh": FAKE_SSH, "srun": FAKE_SRUN}
# Reaches the nodes through the remote shell that it is given, and writes down how the training ended.
DRIVER = """
import json, os, sys
from zerovision.launch.arguments import check_training, read_arguments
from zerovision.launch import launch, nodes, rendezvous
from zerovision.launch.plan import Plan
from zerovision.training.base.lasting_output import outlast_readers
nodes.LOST_SECONDS = float(os.environ.get("LOST_SECONDS", nodes.LOST_SECONDS))
remote_shell, outcome, *words = sys.argv[1:]
outlast_readers()
rendezvous.FIRST_PATIENCE_SECONDS = launch.RETURN_SECONDS = 1.0
launch.Nodes = lambda shell: nodes.Nodes(remote_shell)
launch.Plan = lambda given, arguments, config, hosts, _ssh, port: Plan(
    given, arguments, config, hosts, remote_shell, port)
train = launch.train
def write_outcome(*arguments):
    started = train(*arguments)
    with open(outcome, "w") as file:
        json.dump({"code": started.ending.code, "reason": started.ending.reason, "position": started.position,
                   "run_name": started.run_name}, file)
    return started
launch.train = write_outcome
sys.exit(launch.main(["launch_multi_node.sh", *words]))
"""


class StubLaunch:
    """A launch on two names of this machine, with a stub for the training entry."""

    def __init__(
        self, folder: Path, *flags: str, own: tuple[str, ...] = (), remote_shell: str = "ssh", **changes: str
    ) -> None:
        self.folder = folder / "stub"
        self.folder.mkdir()
        root = stub_repo(folder)
        # How long the others may wait for a dead rank in a collective: these have none.
        node_run = root / "zerovision" / "launch" / "node_run.py"
        node_run.write_text(node_run.read_text().replace("DEAD_RANK_SECONDS = 5.0", "DEAD_RANK_SECONDS = 1.0"))
        tools = folder / "bin"
        tools.mkdir()
        for name, text in FAKES.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.outcome = folder / "outcome.json"
        words = ["mobilenet", "ddp", "2", "1", "16", "3", "--hosts=one,two", *own, *flags]
        given = {"STUB_FOLDER": str(self.folder), "FORWARD_ENV": "STUB_FOLDER"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, remote_shell, str(self.outcome), *words],
            cwd=root,
            env=environment(PATH=f"{tools}:{os.environ['PATH']}", **(given | changes)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear_ctrl_c,
        )

    def end(self) -> tuple[int, str]:
        """Wait; return the exit code and what stderr got."""
        errors = self.process.communicate(timeout=90)[1]
        return self.process.returncode, errors

    def wait_for_rank(self, rank: int, restarts: int = 0) -> dict[str, Any]:
        path = self.folder / f"rank{rank}-{restarts}.json"
        wait_until(path.exists, 60)
        return json.loads(path.read_text())

    def wait_for_line(self, words: str) -> str:
        """Return the first line of stderr with these words."""
        assert self.process.stderr
        return next(line for line in self.process.stderr if words in line)

    def record(self) -> dict[str, Any]:
        return json.loads(self.outcome.read_text())


@pytest.mark.parametrize("remote_shell", ["ssh", pytest.param("srun", marks=pytest.mark.slow)])
def test_ranks_of_two_nodes_finish(tmp_path: Path, remote_shell: str) -> None:
    launch = StubLaunch(tmp_path, "--fault", "finish", remote_shell=remote_shell)
    code, errors = launch.end()
    assert code == 0, errors
    assert "2 nodes x 1" in errors
    assert launch.wait_for_rank(0)["port"] == launch.wait_for_rank(1)["port"]
    assert launch.record() == {"code": 0, "reason": "", "position": -1, "run_name": "run-7"}
    assert not list(launch.folder.glob(".*"))  # the mark that the others looked for is gone


@pytest.mark.parametrize("fails", ["", "two"])
def test_the_doctor_asks_the_agents_that_start_the_ranks(tmp_path: Path, fails: str) -> None:
    """So each host is reached once."""
    changes = {"FAKE_SSH_FAILS": fails, "FAKE_SSH_REASON": "Permission denied (publickey)."}
    launch = StubLaunch(tmp_path, "--fault", "finish", own=("--preflight",), **changes)
    rows, errors = launch.process.communicate(timeout=90)
    assert launch.process.returncode == (1 if fails else 0), rows + errors
    assert ("ssh wants a password" in rows) == bool(fails)
    assert ("2 nodes x 1" in errors, launch.outcome.exists()) == (not fails, not fails)
    assert sorted((launch.folder / "reached").read_text().split()) == ["one", "two"]


def test_nodes_are_not_lost_while_nobody_reads_what_their_ranks_print(tmp_path: Path) -> None:
    """A terminal is paused by Ctrl-S, the pipe to a pager or to a stopped reader is full."""
    launch = StubLaunch(tmp_path, "--fault", "talk", LOST_SECONDS="2")
    launch.wait_for_rank(1)
    time.sleep(4)
    printed, errors = launch.process.communicate(timeout=90)
    assert launch.process.returncode == 0, errors
    assert printed.count("x") == 2 * 500_000


def test_a_failure_on_one_node_starts_both_again(tmp_path: Path) -> None:
    launch = StubLaunch(tmp_path, "--fault", "kill", "--save")
    code, errors = launch.end()
    assert code == 0, errors
    assert "restart 1 of 3" in errors
    assert "--run-name=run-7" in launch.wait_for_rank(0, restarts=1)["argv"]
    assert launch.record()["position"] == 0
    assert "SIGKILL" in errors


@pytest.mark.parametrize("remote_shell", ["ssh", pytest.param("srun", marks=pytest.mark.slow)])
def test_nothing_listens_for_agents_and_no_agent_connects(tmp_path: Path, remote_shell: str) -> None:
    """A stranger on the network has nobody to talk to, and no secret of ours stands in a process list."""
    launch = StubLaunch(tmp_path, remote_shell=remote_shell)
    for rank in (0, 1):
        launch.wait_for_rank(rank)
    leading = psutil.Process(launch.process.pid)
    agents = [
        one for one in leading.children(recursive=True) if "zerovision/launch/agent.py" in " ".join(one.cmdline())
    ]
    assert {one.cmdline()[-1] for one in agents} == {"one", "two"}
    assert [one.net_connections("inet") for one in (leading, *agents)] == [[]] * (1 + len(agents))
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end()[0] == 143


def test_too_few_nodes_end_the_launch(tmp_path: Path) -> None:
    reason = {"FAKE_SSH_FAILS": "two", "FAKE_SSH_REASON": "Connection refused"}
    launch = StubLaunch(tmp_path, own=("--start-timeout", "3"), **reason)
    code, errors = launch.end()
    assert code == 69
    assert "1 of 2 nodes reached" in errors
    assert "two: Connection refused" in errors
    assert launch.record()["code"] == 69


@pytest.mark.parametrize("fails", ["two", pytest.param("one", marks=pytest.mark.slow)])
def test_a_node_that_is_back_takes_part_again(tmp_path: Path, fails: str) -> None:
    """The rank that goes on without it saves and stops, and both start: no failure, so it needs no --max-restarts."""
    up = tmp_path / "up"
    away = {"FAKE_SSH_FAILS": fails, "FAKE_SSH_REASON": "No route to host", "UP_SINCE": str(up)}
    launch = StubLaunch(tmp_path, own=("--min-nodes", "1", "--max-restarts", "0"), **away)
    alone = launch.wait_for_rank(0)
    assert "--gradient-accumulation-steps=2" in alone["argv"]
    time.sleep(2)
    assert not (launch.folder / "rank0-1.json").exists()
    up.touch()
    code, errors = launch.end()
    assert code == 0, errors
    assert [one[0] for one in launch.wait_for_rank(0)["received"]] == [signal.SIGTERM]
    for rank in (0, 1):
        argv = launch.wait_for_rank(rank, restarts=1)["argv"]
        assert "--run-name=run-7" in argv
        assert "--gradient-accumulation-steps=2" not in argv
    assert "1 of 2 nodes x 1 CPU rank" in errors
    assert f"{fails} can rejoin: the ranks save first" in errors
    assert "\n2 nodes x 1 CPU rank" in errors
    assert "restart 1" not in errors


@pytest.mark.slow
def test_a_node_whose_rank_hangs_twice_is_left_out(tmp_path: Path) -> None:
    """And is asked again later; without --min-nodes it takes part to the end."""
    launch = StubLaunch(tmp_path, "--fault", "stop", "--always", "--save", "--save", own=("--min-nodes", "1"))
    alone = launch.wait_for_rank(0, restarts=2)
    assert "--gradient-accumulation-steps=2" in alone["argv"]
    both = launch.wait_for_rank(1, restarts=3)
    assert "--gradient-accumulation-steps=2" not in both["argv"]
    launch.process.send_signal(signal.SIGTERM)
    code, errors = launch.end()
    assert code == 143, errors
    assert errors.count("rank 1 hung") == 2
    assert "two can rejoin" in errors


def test_a_node_that_is_back_with_another_version_is_not_waited_for(tmp_path: Path) -> None:
    up = tmp_path / "up"
    odd = {"ODD_PATH": odd_torch(tmp_path), "ODD_SINCE": str(tmp_path)}
    away = {"FAKE_SSH_FAILS": "two", "FAKE_SSH_REASON": "No route to host", "UP_SINCE": str(up)}
    launch = StubLaunch(tmp_path, own=("--min-nodes", "1"), **odd, **away)
    launch.wait_for_rank(0)
    up.touch()
    launch.wait_for_line("left out: two: torch 0.0.1")
    time.sleep(2)
    (launch.folder / "stop-0").write_text("15")
    code, errors = launch.end()
    assert code == 143
    assert "left out" not in errors
    assert "save first" not in errors


def odd_torch(folder: Path) -> str:
    """Return a folder that makes another version of torch known to a Python that searches it."""
    metadata = folder / "odd" / "torch-0.0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n")
    return str(metadata.parent)


@pytest.mark.parametrize("allowed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_version_on_one_node_is_refused_before_the_start(tmp_path: Path, allowed: bool) -> None:
    odd = {"ODD_PATH": odd_torch(tmp_path), "ODD_SINCE": str(tmp_path)}
    own = ("--allow-differences",) * allowed
    launch = StubLaunch(tmp_path, "--fault", "finish", own=own, **odd)
    code, errors = launch.end()
    assert f"two: torch 0.0.1 (elsewhere {version('torch')})" in errors
    assert code == (0 if allowed else 2), errors
    assert (launch.folder / "rank0-0.json").exists() == allowed
    if not allowed:
        assert len(errors.splitlines()) == 1
        assert "--allow-differences" in errors


@pytest.mark.parametrize("mended", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_node_that_comes_back_with_another_version_is_left_out_until_it_is_mended(
    tmp_path: Path, mended: bool
) -> None:
    odd = {"ODD_PATH": odd_torch(tmp_path), "ODD_SINCE": str(tmp_path / "stub/rank1-0.json")}
    own = ("--start-timeout", "90" if mended else "5")
    launch = StubLaunch(tmp_path, "--fault", "7", own=own, **odd)
    reason = f"two: torch 0.0.1 (elsewhere {version('torch')})"
    assert launch.wait_for_line("left out") == f"left out: {reason}\n"
    assert not (launch.folder / "rank0-1.json").exists()
    if mended:
        shutil.rmtree(odd["ODD_PATH"])
    code, errors = launch.end()
    assert code == (0 if mended else 69), errors
    assert "left out" not in errors  # once is enough, though it has been asked again
    assert mended or f"1 of 2 nodes reached, 2 needed: {reason}" in errors


def test_what_most_machines_have_is_usual_and_the_launch_decides_a_tie() -> None:
    new, old = {"torch": "2.15.0", "code": "a" * 64}, {"torch": "2.14.0", "code": "a" * 64}
    assert differences({"a": new, "b": new}, old) == {}
    assert differences({"a": new, "b": old}, new) == {"b": "torch 2.14.0 (elsewhere 2.15.0)"}
    assert differences({"a": new, "b": old}, old) == {"a": "torch 2.15.0 (elsewhere 2.14.0)"}
    assert differences({"a": new, "b": new, LAUNCHING: old}, old) == {LAUNCHING: "torch 2.14.0 (elsewhere 2.15.0)"}
    other_code = new | {"code": "b" * 64}
    assert differences({"a": new, "b": new, "c": other_code}, other_code) == {
        "c": "code bbbbbbbbbbbb (elsewhere aaaaaaaaaaaa)"
    }
    assert by_reason({"a": "x", "b": "y", "c": "x"}) == "a, c: x; b: y"


class FolderNode:
    """Answers questions about a log folder as an agent does, whose log folder is `own` in truth."""

    def __init__(self, folder: Path, own: Path) -> None:
        self.messages: dict[str, Any] = {}
        self._folder, self._own = folder, own

    def lost(self) -> str:
        return ""

    def prepare(self, order: dict[str, Any]) -> None:
        """It is ready already."""

    def send(self, what: str, **given: Any) -> None:
        if what == "mark":
            mark = leave_mark(self._own)
            self.messages["mark"] = {"mark": str(self._folder / mark.name)}
        elif what == "see":
            self.messages["see"] = {"is_seen": sees_mark(self._own / Path(given["mark"]).name, 0.0)}


@pytest.mark.parametrize(
    ("disks", "odd", "unseen_on"),
    [
        ("xxx", "", ""),
        ("x", "", ""),
        ("xxy", "c", "c"),
        ("xyy", "a", "b, c"),  # the first is the odd one
        ("xy", "ab", "b"),  # of two neither can be trusted
    ],
)
def test_hosts_that_do_not_share_the_log_folder_are_named(tmp_path: Path, disks: str, odd: str, unseen_on: str) -> None:
    for disk in disks:
        (tmp_path / disk).mkdir(exist_ok=True)
    hosts = list("abc"[: len(disks)])
    nodes = Nodes("ssh")
    nodes.found = {host: FolderNode(tmp_path, tmp_path / disk) for host, disk in zip(hosts, disks, strict=True)}  # type: ignore[misc]
    found = unshared(nodes, hosts, str(tmp_path))
    assert sorted(found) == sorted(odd)
    assert set(found.values()) <= {f"what a writes in {tmp_path} does not appear on {unseen_on}"}


def test_no_thread_still_prints_an_agents_last_words_when_the_launch_ends(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """If one printed while Python shuts down, Python would abort, with exit code 134."""
    last_words = [sys.executable, "-c", "import sys; sys.stdin.read(); print('bye'); print('bye', file=sys.stderr)"]
    monkeypatch.setitem(nodes.SHELLS, "ssh", lambda _host, _command: (last_words, None))
    print_now = nodes._print

    def print_slowly(printed: bytes) -> None:
        time.sleep(0.2)
        print_now(printed)

    monkeypatch.setattr(nodes, "_print", print_slowly)
    before = threading.active_count()
    agents = Nodes("ssh")
    agents.connect(["a"])
    agents.close()
    assert threading.active_count() == before
    assert capsysbinary.readouterr().out == b"bye\n"


@pytest.mark.parametrize("is_asked", [False, True])
def test_an_agent_whose_examiner_is_killed_ends_with_its_exit_code(is_asked: bool, tmp_path: Path) -> None:
    """Whether it is killed over a question or between two; the launch sees that the connection ended."""
    process = subprocess.Popen([*AGENT, "a"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin
    assert process.stdout
    channel = Channel(process.stdout.fileno(), process.stdin.fileno())
    answers = (message for message in channel.messages() if message["kind"] != "beat")
    channel.send({"kind": "mark", "folder": str(tmp_path)})
    assert Path(next(answers)["mark"]).exists()
    question = {"kind": "listen", "addresses": {"a": "127.0.0.1"}}
    channel.send(question)
    assert next(answers)["port"]
    (examiner,) = psutil.Process(process.pid).children()
    if is_asked:
        examiner.suspend()
        channel.send(question)
        time.sleep(0.2)
    examiner.kill()
    if not is_asked:
        wait_until(lambda: examiner.status() == psutil.STATUS_ZOMBIE)
        channel.send(question)
    assert next(answers, None) is None
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors, [*tmp_path.iterdir()]) == (128 + signal.SIGKILL, b"", [])


def test_hosts_that_are_tried_again_and_again_leave_no_threads_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nodes.SHELLS, "ssh", lambda _host, _command: (["false"], None))
    with closing(Nodes("ssh")) as agents:
        for _ in range(5):
            agents.connect(["a"])
            for reader in agents._readers:
                reader.join()
        assert len(agents._readers) <= 2  # at most those of the last try: its messages and its errors


class ReadyNodes(Nodes):
    """Agents that are ready at once, each with so many GPUs; they share a log folder."""

    def __init__(self, folder: Path, gpus: dict[str, int]) -> None:
        super().__init__("ssh")
        self._folder, self._gpus = folder, gpus

    def connect(self, hosts: list[str]) -> None:
        for host in hosts:
            node = FolderNode(self._folder, self._folder)
            own = [("eth0", f"10.0.0.{len(self.found) + 1}", "255.255.255.0")]
            node.messages["ready"] = {"gpus": self._gpus[host], "address": "", "addresses": own, "port": 1}
            node.messages["ready"]["software"] = software()
            self.found[host] = node  # type: ignore[assignment]


def test_a_node_that_lost_a_gpu_ends_a_launch_but_not_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = plan("abc", ranks_per_node=8, gradient_accumulation_steps=6, log_dir=str(tmp_path))
    gpus = {"a": 8, "b": 7, "c": 8}
    with pytest.raises(CannotStart, match=r"b: has 7 GPUs. 8 GPUs per node requested.") as refused:
        next_rendezvous(ReadyNodes(tmp_path, gpus), launch, [], set(), is_restart=False)
    assert refused.value.exit_code == 2
    monkeypatch.setattr("zerovision.launch.rendezvous.PATIENCE_SECONDS", 0.1)
    nodes = ReadyNodes(tmp_path, gpus)
    found = next_rendezvous(nodes, launch, [], set(), is_restart=True)
    assert found
    assert [nodes.found[host] for host in ("a", "c")] == found.nodes


@pytest.mark.parametrize(("min_nodes", "used"), [(1, "ac"), (3, "abc")])
def test_a_doubtful_node_is_left_out_if_the_others_are_enough(tmp_path: Path, min_nodes: int, used: str) -> None:
    launch = plan("abc", min_nodes, ranks_per_node=8, gradient_accumulation_steps=6, log_dir=str(tmp_path))
    nodes = ReadyNodes(tmp_path, dict.fromkeys("abc", 8))
    found = next_rendezvous(nodes, launch, [], {"b"}, is_restart=True)
    assert found
    assert [nodes.found[host] for host in used] == found.nodes


def test_a_mark_that_appears_late_is_seen(tmp_path: Path) -> None:
    """Also in a folder that is not there yet; what is written lies in the nearest one that is."""
    mark = tmp_path / "logs" / "mark"
    assert not sees_mark(mark, 0.0)
    mark.parent.mkdir()
    threading.Timer(0.3, mark.touch).start()
    assert sees_mark(mark, 10.0)
    assert leave_mark(tmp_path / "absent" / "logs").parent == tmp_path


def test_a_host_that_lets_nobody_in_is_the_users_to_mend(tmp_path: Path) -> None:
    reason = {"FAKE_SSH_FAILS": "one two", "FAKE_SSH_REASON": "Permission denied (publickey)."}
    code, errors = StubLaunch(tmp_path, **reason).end()
    assert code == 2
    (line,) = errors.splitlines()
    assert all(f"{host}: Permission denied" in line for host in ("one", "two"))


def test_the_last_lines_of_a_remote_shell_are_read_before_it_counts_as_failed() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    shell = Shell(process, "one")

    def read_late() -> None:
        shell.lines.append("one: Permission denied (publickey).")
        shell.all_read.set()

    threading.Timer(0.2, read_late).start()
    assert shell.failure() == "one: Permission denied (publickey)."


def test_no_mark_is_left_in_this_environment() -> None:
    assert MARK not in os.environ


@pytest.mark.parametrize(
    ("gloo", "nccl", "said"),
    [
        ("", "", ""),
        ("eth0", "", ""),
        ("lo,eth0", "", ""),
        ("eth", "", "GLOO_SOCKET_IFNAME 'eth': no interface 'eth'; this machine has enp3s0, eth0, eth1, lo"),  # exact
        ("eth0,ib0", "", "GLOO_SOCKET_IFNAME 'eth0,ib0': no interface 'ib0'; "),
        ("docker0", "", "no interface 'docker0'"),  # without an address
        ("", "eth", ""),
        ("", "ib,enp", ""),
        ("", "=eth0", ""),
        ("", "=eth", "NCCL_SOCKET_IFNAME '=eth' matches no interface; this machine has enp3s0, eth0, eth1, lo"),
        ("", "=ib0,eth1:1234", ""),
        ("", "ib", "NCCL_SOCKET_IFNAME 'ib' matches no interface"),
        ("", "^ib", ""),
        ("", "^docker,lo", ""),
        ("", "^=eth,enp,lo", ""),
        ("", "^eth,enp,lo", "NCCL_SOCKET_IFNAME '^eth,enp,lo' matches no interface"),
        ("", "^=eth0,eth1,lo,enp3s0", "matches no interface"),
    ],
)
def test_an_interface_that_is_not_there_is_refused(gloo, nccl, said, monkeypatch):
    """gloo's names are exact; NCCL's as in its documentation of NCCL_SOCKET_IFNAME."""
    addresses = {
        **{name: [SimpleNamespace(family=socket.AF_INET)] for name in ("eth0", "eth1", "lo")},
        "enp3s0": [SimpleNamespace(family=socket.AF_PACKET), SimpleNamespace(family=socket.AF_INET6)],
        "docker0": [SimpleNamespace(family=socket.AF_PACKET)],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    variables = {"GLOO_SOCKET_IFNAME": gloo, "NCCL_SOCKET_IFNAME": nccl}
    if said:
        with pytest.raises(UserError) as caught:
            machine.check_chosen_interfaces(variables, has_gpus=True)
        assert said in str(caught.value)
        assert str(caught.value).count("\n") == 0
    else:
        machine.check_chosen_interfaces(variables, has_gpus=True)
    if not gloo:  # without GPUs nothing uses NCCL
        machine.check_chosen_interfaces(variables, has_gpus=False)
