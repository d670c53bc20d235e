"""Trainings on two nodes over ssh: as exact as on one machine, and what becomes of them when something breaks.

Each fault is timed: from the fault until it is said, and until a step is done again. The table goes to the file that
CLUSTER_TABLE names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cluster.hosts import REPO_ROOT, SHARED, Hosts
from tests.cluster.trainings import (
    ENTRY,
    RUN,
    Training,
    agent,
    assert_auto_was_planned,
    flags,
    ranks,
    read_metrics,
    train_on_login,
)
from zerovision.training.base.heartbeat import RUN_ID_VARIABLE

pytestmark = pytest.mark.cluster

MODEL = "timm:test_convnext"  # no BatchNorm: another number of ranks gives the same weights
RECIPE = ("--learning-rate", "0.004", "--hang-timeout", "8")
EPOCHS = 6
BREAK_AT = 20  # optimizer steps
NOTICED = r"restart 1 of"
ROWS: list[tuple[str, float | None, float, str]] = []


def words(folder: Path, *more: str, nodes: int = 2, ranks_per_node: int = 1, epochs: int = EPOCHS) -> list[str]:
    """What launch_multi_node.sh gets, for a global batch of 32 on two ranks."""
    batch_size = 32 // (nodes * ranks_per_node)
    sizes = [str(nodes), str(ranks_per_node), str(batch_size), str(epochs)]
    return [MODEL, "ddp", *sizes, *flags(folder, *RECIPE, *more)]


@pytest.fixture(scope="module")
def uninterrupted(_hosts: Hosts) -> Path:
    """The folder of the same training on one machine with two ranks, through launch_distributed.sh."""
    folder = SHARED / "uninterrupted"
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    return train_on_login(_hosts, folder, [MODEL, "ddp", "2", "16", str(EPOCHS), *flags(folder, *RECIPE)])


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Write the table of faults and times once all tests have run."""
    yield
    lines = ["| fault | noticed after | training again after | then |", "|---|---|---|---|"]
    lines += [f"| {fault} | {seconds(noticed)} | {seconds(again)} | {then} |" for fault, noticed, again, then in ROWS]
    Path(os.environ.get("CLUSTER_TABLE", "/dev/stdout")).write_text("\n".join(lines) + "\n")


def seconds(value: float | None) -> str:
    """A duration for the table, a dash where nothing had to be noticed."""
    return "-" if value is None else f"{value:.1f} s"


def largest_difference(folder: Path, other: Path) -> float:
    """The largest difference between the weights of two runs, which must have the same names and shapes."""
    ours, theirs = (load_file(run / "model.safetensors") for run in (folder, other))
    assert ours.keys() == theirs.keys()
    return max((ours[name].double() - theirs[name].double()).abs().max().item() for name in ours)


def top1(run: Path) -> float:
    """The best top-1 of a run."""
    entries = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return max(entry["val_top1"] for entry in entries if entry["kind"] == "epoch")


def test_two_nodes_train_what_one_machine_does(hosts: Hosts, shared: Path, uninterrupted: Path) -> None:
    """2 nodes x 2 ranks: the accuracy and, but for rounding, the weights of 1 machine with the same global batch."""
    training = Training(hosts, shared, words(shared, "--preflight", ranks_per_node=2), 2, 2)
    assert training.end() == 0, training.text()
    assert "0 wrong" in training.text()
    run = shared / "logs/runs" / RUN
    assert largest_difference(run, uninterrupted) < 1e-4
    assert abs(top1(run) - top1(uninterrupted)) < 0.01
    assert "eth0" in training.text()
    training.assert_nothing_is_left()


@pytest.mark.parametrize("dimension", ["tensor", "pipeline"])
def test_a_mesh_over_two_nodes_trains_what_one_machine_does(hosts: Hosts, shared: Path, dimension: str) -> None:
    """Of 2 nodes x 2 ranks each node is a group or a pipeline; the bytes are those of 4 ranks of one machine."""
    mesh = [*RECIPE, f"--{dimension}-parallel", "2", "--gradient-accumulation-steps", "2"]
    training = Training(hosts, shared, [MODEL, "ddp", "2", "2", "8", "1", *flags(shared, *mesh)], 2, 2)
    assert training.end() == 0, training.text()
    assert f"data 2 x {dimension} 2" in training.text()
    folder = shared / "again"
    again = train_on_login(hosts, folder, [MODEL, "ddp", "4", "8", "1", *flags(folder, *mesh)])
    assert training.weights() == (again / "model.safetensors").read_bytes()


def test_auto_chooses_the_strategy_and_the_batch_size_of_all_nodes(hosts: Hosts, shared: Path) -> None:
    """And trains what one machine does with what was found."""
    batch = [*RECIPE, "--global-batch", "64"]
    training = Training(hosts, shared, [MODEL, "auto", "2", "1", "auto", "1", *flags(shared, *batch)], 2, 1)
    assert training.end() == 0, training.text()
    strategy, size = assert_auto_was_planned(shared / "logs/runs" / RUN, training.text(), ranks=2, global_batch=64)
    folder = shared / "again"
    again = train_on_login(hosts, folder, [MODEL, strategy, "2", size, "1", *flags(folder, *batch)])
    assert training.weights() == (again / "model.safetensors").read_bytes()
    training.assert_nothing_is_left()


def test_variables_of_the_launching_shell_reach_the_ranks(hosts: Hosts, shared: Path) -> None:
    """Those of NCCL, OMP and the user's own choice, with characters that a shell would read."""
    canary = shared / "canary"
    odd = f"a b'c\"$(touch {canary});`touch {canary}`\n&"
    given = {"NCCL_DEBUG_FILE": odd, "OMP_DYNAMIC": "FALSE", "MY_OWN": odd, "FORWARD_ENV": "MY_OWN", "NOT_OURS": "1"}
    training = Training(hosts, shared, words(shared, epochs=30), 2, 1, **given)
    training.wait_for_step(1)
    (rank,) = ranks(hosts, "node02")
    read = hosts.run("node02", ["cat", f"/proc/{rank}/environ"]).stdout.split("\0")
    environment = dict(entry.split("=", 1) for entry in read if entry)
    assert environment["NCCL_DEBUG_FILE"] == environment["MY_OWN"] == odd
    assert environment["OMP_DYNAMIC"] == "FALSE"
    assert "NOT_OURS" not in environment
    assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
    # The id of the start comes that way, too; what the ranks meet on is open to the nodes' network alone.
    assert len(bytes.fromhex(environment[RUN_ID_VARIABLE])) == 8
    place = re.search(r"they meet on ([\d.]+):(\d+)", training.text())
    assert place
    code = f"import sys, socket; socket.create_connection((sys.argv[1], {place[2]}), 5)"
    answers = {own: hosts.run("node01", ["python3", "-c", code, own]).returncode for own in (place[1], "127.0.0.1")}
    assert answers == {place[1]: 0, "127.0.0.1": 1}
    training.signal(signal.SIGTERM)
    assert training.end() == 143
    assert not canary.exists()


@contextlib.contextmanager
def loopback_names(hosts: Hosts) -> Iterator[None]:
    """The nodes' own names resolve to 127.0.1.1 on themselves, as Debian writes it into /etc/hosts."""
    nodes = ("node01", "node02")
    for node in nodes:
        change = f"(echo 127.0.1.1 {node}; cat /etc/hosts) > /tmp/hosts && mount --bind /tmp/hosts /etc/hosts"
        hosts.run(node, ["sh", "-c", change])
    try:
        yield
    finally:
        for node in nodes:
            hosts.run(node, ["umount", "/etc/hosts"])


def test_a_name_that_resolves_to_loopback_does_no_harm(hosts: Hosts, shared: Path) -> None:
    with loopback_names(hosts):
        training = Training(hosts, shared, words(shared, epochs=1), 2, 1)
        assert training.end() == 0, training.text()
        assert "2 CPU ranks over gloo on eth0" in training.text()


def kill(hosts: Hosts, node: str, part: str) -> None:
    """Kill every process of a node whose command line has this part, with -9."""
    hosts.signal(node, signal.SIGKILL, *hosts.processes(node, part))


def kill_ranks(hosts: Hosts, node: str) -> None:
    """Kill the ranks of a node with -9."""
    hosts.signal(node, signal.SIGKILL, *ranks(hosts, node))


Break = Callable[[Hosts], None]
CURABLE: dict[str, tuple[Break, str]] = {
    "a rank killed with -9": (lambda hosts: kill_ranks(hosts, "node02"), "rank 1"),
    "a node's launcher killed with -9": (lambda hosts: kill(hosts, "node02", "local_ranks.py"), ""),
    "a node's agent killed with -9": (
        lambda hosts: hosts.signal("node02", signal.SIGKILL, agent(hosts, "node02")),
        "node02 is lost",
    ),
    "every process of a node killed with -9": (lambda hosts: kill(hosts, "node02", ".py"), "node02 is lost"),
    "every process of rank 0's node killed with -9": (lambda hosts: kill(hosts, "node01", ".py"), "node01 is lost"),
    "a rank stopped (SIGSTOP), which hangs": (
        lambda hosts: hosts.signal("node02", signal.SIGSTOP, *ranks(hosts, "node02")),
        "rank 1 hung",
    ),
}


@pytest.mark.parametrize("fault", CURABLE)
def test_a_failure_on_one_node_restarts_all(hosts: Hosts, shared: Path, uninterrupted: Path, fault: str) -> None:
    """The restarted run ends with the bytes of the uninterrupted one."""
    damage, said = CURABLE[fault]
    training = Training(hosts, shared, words(shared), 2, 1)
    training.wait_for_step(BREAK_AT)
    broken = time.time()
    damage(hosts)
    noticed = training.wait_for_text(NOTICED)
    again = training.wait_for_step(1, after=noticed)
    assert said in training.text()
    finish(training, uninterrupted)
    ROWS.append((fault, noticed - broken, again - broken, "2 nodes, bit-identical"))


def finish(training: Training, uninterrupted: Path) -> None:
    """The training ends well, with the bytes of the uninterrupted one, and leaves no process."""
    assert training.end() == 0, training.text()
    assert training.weights() == (uninterrupted / "model.safetensors").read_bytes()
    training.assert_nothing_is_left()


@pytest.mark.parametrize("kind", ["unplug", "blackhole"])
def test_a_cable_out_for_3_seconds_costs_nothing(hosts: Hosts, shared: Path, uninterrupted: Path, kind: str) -> None:
    training = Training(hosts, shared, words(shared), 2, 1)
    training.wait_for_step(BREAK_AT)
    broken = time.time()
    hosts.fault("node02", kind)
    time.sleep(3)
    hosts.fault("node02", "clear")
    again = training.wait_for_step(BREAK_AT, after=time.time())
    finish(training, uninterrupted)
    assert "restart" not in training.text()
    ROWS.append((f"cable out for 3 s ({kind})", None, again - broken, "no restart, bit-identical"))


def test_a_cable_out_for_longer_restarts_when_it_is_back(hosts: Hosts, shared: Path, uninterrupted: Path) -> None:
    training = Training(hosts, shared, words(shared), 2, 1)
    training.wait_for_step(BREAK_AT)
    broken = time.time()
    hosts.fault("node02", "unplug")
    noticed = training.wait_for_text(NOTICED)
    training.assert_nothing_is_left("node02")  # nobody could tell it: it ends by itself
    hosts.fault("node02", "clear")
    plugged = time.time()
    again = training.wait_for_step(1, after=plugged)
    finish(training, uninterrupted)
    then = f"2 nodes, bit-identical ({again - plugged:.1f} s after it was back)"
    ROWS.append(("cable out for longer", noticed - broken, again - broken, then))


@pytest.mark.parametrize("kind", ["crash", "poweroff"])
@pytest.mark.parametrize("node", ["node01", "node02"])
def test_a_node_lost_for_good_leaves_the_others(
    hosts: Hosts, shared: Path, uninterrupted: Path, node: str, kind: str
) -> None:
    """With --min-nodes 1 training goes on with the same micro-batches on half the ranks; the same bytes come out."""
    training = Training(hosts, shared, words(shared, "--min-nodes", "1"), 2, 1)
    training.wait_for_step(BREAK_AT)
    broken = time.time()
    hosts.fault(node, kind)
    noticed = training.wait_for_text(NOTICED)
    again = training.wait_for_step(1, after=noticed)
    assert training.end() == 0, training.text()
    assert f"{node} is lost" in training.text()
    assert "1 of 2 nodes" in training.text()
    assert re.search(r"global batch 32 = 16 per CPU rank x 1 CPU rank x 2 accumulation", training.text())
    assert training.weights() == (uninterrupted / "model.safetensors").read_bytes()
    training.assert_nothing_is_left(*{"node01", "node02"} - {node})
    ROWS.append((f"{node} lost ({kind}), --min-nodes 1", noticed - broken, again - broken, "1 node, bit-identical"))


def test_a_node_that_comes_back_takes_part_again(hosts: Hosts, shared: Path, uninterrupted: Path) -> None:
    """Without --min-nodes training waits for the node."""
    training = Training(hosts, shared, words(shared), 2, 1)
    training.wait_for_step(BREAK_AT)
    broken = time.time()
    hosts.fault("node02", "poweroff")
    noticed = training.wait_for_text(NOTICED)
    time.sleep(3)
    hosts.boot("node02")
    booted = time.time()
    again = training.wait_for_step(1, after=booted)
    finish(training, uninterrupted)
    then = f"2 nodes, bit-identical ({again - booted:.1f} s after it was back)"
    ROWS.append(("node02 without power, later back", noticed - broken, again - broken, then))


ISLAND_FAULTS: dict[str, tuple[list[Break], Break]] = {  # what breaks it, one after the other, and what mends it
    "an island without power": (
        [lambda hosts: hosts.fault("node02", "poweroff")],
        lambda hosts: hosts.boot("node02"),
    ),
    "an island that hangs twice": ([CURABLE["a rank stopped (SIGSTOP), which hangs"][0]] * 2, lambda hosts: None),
}


@pytest.mark.parametrize("fault", ISLAND_FAULTS)
def test_islands_go_on_without_one_until_it_is_back(hosts: Hosts, shared: Path, fault: str) -> None:
    """Of two islands one is left; once the machine answers again it saves, and there are two.

    After a first hang, of which the machine's agent says so, both go on with new ranks.
    """
    damages, mend = ISLAND_FAULTS[fault]
    training = Training(hosts, shared, words(shared, "--min-nodes", "1", "--local-steps", "4", epochs=999), 2, 1)
    again = 0.0
    for number, damage in enumerate(damages, 1):
        training.wait_for_step(BREAK_AT, after=again)
        broken = time.time()
        damage(hosts)
        noticed = training.wait_for_text(rf"(?s)(restart \d of.*){{{number}}}")  # the count begins anew after a save
        again = training.wait_for_step(1, after=noticed)
    mend(hosts)
    mended = time.time()
    back = training.wait_for_text("node02 can rejoin")
    both = training.wait_for_step(1, after=training.wait_for_text("2 islands in place of the checkpoint's 1"))
    training.signal(signal.SIGTERM)
    assert training.end() == 143, training.text()
    then = f"2 islands {back - mended:.0f} s after it was back, a pause of {both - back:.1f} s"
    ROWS.append((f"{fault}, --min-nodes 1", noticed - broken, again - broken, then))
    assert training.text().count("1 island in place of the checkpoint's 2") == 1
    assert training.text().count("rank 1 hung") == (len(damages) if "hangs" in fault else 0)
    lines = [line for line in read_metrics(shared) if line["kind"] == "outer_step"]
    assert [number for number, _ in groupby(line["islands"] for line in lines)] == [2, 1, 2]
    # The island joins again with all that the other had trained: no step is taken twice at the last start.
    steps = [entry["step"] for entry in training.steps() if entry["time"] > back - 1]
    assert steps == sorted(set(steps))
    training.assert_nothing_is_left()


def test_a_node_that_is_slow_to_start_is_waited_for(hosts: Hosts, shared: Path, uninterrupted: Path) -> None:
    hosts.fault("node02", "poweroff")
    training = Training(hosts, shared, words(shared), 2, 1)
    training.wait_for_text("waiting for node02")
    time.sleep(5)  # node01's agent has been waiting for longer than silence is allowed to last
    hosts.boot("node02")
    booted = time.time()
    again = training.wait_for_step(1)
    assert "is lost" not in training.text()
    finish(training, uninterrupted)
    ROWS.append(("node02 boots after the launch", None, again - booted, "2 nodes, after its boot"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGINT, 130)])
def test_a_signal_saves_on_all_nodes(
    hosts: Hosts, shared: Path, uninterrupted: Path, number: signal.Signals, code: int
) -> None:
    training = Training(hosts, shared, words(shared), 2, 1)
    training.wait_for_step(BREAK_AT)
    training.signal(number)
    assert training.end() == code, training.text()
    assert "checkpoint saved" in training.text()
    training.assert_nothing_is_left()
    again = Training(hosts, shared, words(shared), 2, 1)
    finish(again, uninterrupted)


def test_the_launch_killed_lets_the_ranks_save(hosts: Hosts, shared: Path, uninterrupted: Path) -> None:
    training = Training(hosts, shared, words(shared), 2, 1)
    training.wait_for_step(BREAK_AT)
    training.signal(signal.SIGKILL)
    training.assert_nothing_is_left()
    saved = sorted(path.name for path in (shared / "logs/runs" / RUN / "checkpoints").glob("step-*"))[-1]
    last = training.steps()[-1]["step"]
    assert saved.endswith(str(last % 45).zfill(5)) or last % 45 == 0, (saved, last)
    again = Training(hosts, shared, words(shared), 2, 1)
    finish(again, uninterrupted)


def test_all_bad_hosts_are_named_at_once(hosts: Hosts, shared: Path) -> None:
    """One that does not exist, one that lets nobody in; exit code 2 in seconds, and no rank was started."""
    hosts.run("node02", ["sh", "-c", "mount --bind /dev/null /etc/ssh/authorized_keys"])
    try:
        hostfile = shared / "hosts.txt"
        hostfile.write_text("node01 slots=1\nnode02 slots=1\nno-such-host slots=1\n")
        command = ["bash", str(REPO_ROOT / "scripts/launch_multi_node.sh"), *words(shared, nodes=3)]
        began = time.monotonic()
        result = hosts.run("login", command, cwd=shared, HOSTFILE=str(hostfile))
        assert result.returncode == 2, result.stdout + result.stderr
        (line,) = result.stderr.splitlines()
        assert "node02: Permission denied" in line
        assert "no-such-host" in line
        assert "node01" not in line
        assert time.monotonic() - began < 20
        assert not (shared / "logs/runs").exists()
    finally:
        hosts.run("node02", ["umount", "/etc/ssh/authorized_keys"])


def test_restarts_used_up_end_with_the_reason(hosts: Hosts, shared: Path) -> None:
    training = Training(hosts, shared, words(shared, "--max-restarts", "0"), 2, 1)
    training.wait_for_step(BREAK_AT)
    kill_ranks(hosts, "node02")
    assert training.end() == 137, training.text()
    assert "gave up after 0 restarts" in training.text()
    training.assert_nothing_is_left()


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate"])
def test_other_launchers_by_hand_on_each_node(hosts: Hosts, shared: Path, uninterrupted: Path, launcher: str) -> None:
    """Without any launcher of ours, as in docs/guides/several-machines.md, where names resolve to 127.0.1.1."""
    hostfile = shared / "hosts.txt"
    hostfile.write_text("node01 slots=1\nnode02 slots=1\n")
    master = ["--master_addr=node01", "--master_port=29511"]
    flags_of = {
        "torchrun": ["--nnodes=2", "--nproc_per_node=1", *master, "--node_rank"],
        "deepspeed": ["--hostfile", str(hostfile), "--no_ssh", *master, "--node_rank"],
        "accelerate": [
            *["launch", "--multi_gpu", "--num_machines=2", "--num_processes=2"],
            *["--main_process_ip=node01", "--main_process_port=29511", "--machine_rank"],
        ],
    }
    start = [str(REPO_ROOT / ".venv/bin" / launcher), *flags_of[launcher]]
    given = ["--model-type", MODEL, "--batch-size", "16", "--epochs", str(EPOCHS), *flags(shared, *RECIPE)]
    entry = [str(REPO_ROOT / "scripts" / ENTRY), *given]
    with loopback_names(hosts):
        started = [
            hosts.start(
                node,
                [*start, str(number), *entry],
                cwd=shared,
                output=shared / f"output-{node}.txt",
                DS_ACCELERATOR="cpu",
            )
            for number, node in enumerate(("node01", "node02"))
        ]
        assert [one.wait(240) for one in started] == [0, 0], (shared / "output-node01.txt").read_text()
    assert largest_difference(shared / "logs/runs" / RUN, uninterrupted) == 0


def test_torchrun_by_hand_goes_on_with_fewer_nodes(hosts: Hosts, shared: Path, uninterrupted: Path) -> None:
    """With the c10d rendezvous; every process of the other node is killed, and its kernel says so."""
    given = ["--model-type", MODEL, "--batch-size", "16", "--epochs", str(EPOCHS), *flags(shared, *RECIPE)]
    torchrun = [str(REPO_ROOT / ".venv/bin/torchrun"), "--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3"]
    meeting = ["--rdzv_backend=c10d", "--rdzv_endpoint=node01:29512", "--rdzv_id=first"]
    started = [
        hosts.start(
            node,
            [*torchrun, *meeting, str(REPO_ROOT / "scripts" / ENTRY), *given],
            cwd=shared,
            output=shared / f"output-{node}.txt",
        )
        for node in ("node01", "node02")
    ]
    deadline = time.monotonic() + 120
    while not any(entry["kind"] == "step" and entry["step"] >= BREAK_AT for entry in read_metrics(shared)):
        assert time.monotonic() < deadline, (shared / "output-node01.txt").read_text()
        time.sleep(0.1)
    broken = time.time()
    hosts.fault("node02", "crash")
    assert started[0].wait(240) == 0, (shared / "output-node01.txt").read_text()
    after = [entry["time"] for entry in read_metrics(shared) if entry["kind"] == "resume"]
    assert largest_difference(shared / "logs/runs" / RUN, uninterrupted) < 1e-4
    ROWS.append(("node02 lost (crash), torchrun by hand", None, min(after) - broken, "1 node, bit-identical"))


def test_a_busy_port_is_named(hosts: Hosts, shared: Path) -> None:
    listener = hosts.start(
        "node01", ["python3", "-c", "import socket,time; s=socket.create_server(('', 29533)); time.sleep(60)"]
    )
    try:
        time.sleep(1)
        training = Training(hosts, shared, words(shared, "--master_port", "29533"), 2, 1)
        assert training.end() == 2
        assert "node01" in training.text()
        assert "29533" in training.text()
    finally:
        kill(hosts, "node01", "29533")
        listener.wait()
