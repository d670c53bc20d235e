"""How the doctor tells hosts apart: who differs, and who cannot be reached and why."""

from __future__ import annotations

import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.kit import new_model
from zerovision.launch.assess import (
    Row,
    assess_all_reduce,
    assess_copies,
    assess_paths,
    assess_versions,
    join_hosts,
    some_of,
)
from zerovision.launch.doctor import Request, _examine_shared_logs, _facts, examine, explain
from zerovision.launch.machine_facts import data_facts, measure_network, open_port, try_paths
from zerovision.launch.nodes import Nodes
from zerovision.training.config import TrainConfig
from zerovision.training.world.machine import free_port, own_addresses

COMPLAINTS = {
    "ssh: Could not resolve hostname node09: Name or service not known": "no such host name",
    "ssh: connect to host node01 port 22: Connection refused": "connection refused",
    "ssh: connect to host node01 port 22: Connection timed out": "timed out",
    "Connection timed out during banner exchange\nConnection to 10.0.0.1 port 22 timed out": "timed out",
    "ssh: connect to host node01 port 22: No route to host": "no route",
    "No ED25519 host key is known for node01 and you have requested strict checking.\n"
    "Host key verification failed.": "host key is unknown",
    "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.": "has changed",
    "root@node01: Permission denied (publickey,password).": "wants a password",
    "kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.1 port 22": "closed",
    "python: can't open file '/x/zerovision/launch/agent.py': [Errno 2] No such file or directory": "repository",
}


@pytest.mark.parametrize(("complaint", "said"), COMPLAINTS.items())
def test_why_a_host_cannot_be_reached(complaint: str, said: str) -> None:
    found, cure = explain("node01", 2 if "agent.py" in complaint else 255, complaint)
    assert said in found
    assert cure


def test_a_missing_environment_and_anything_else() -> None:
    assert sys.executable in str(explain("node01", 127, f"bash: line 1: {sys.executable}: No such file or directory"))
    assert "ended with code 3: boom" in explain("node01", 3, "Traceback\nboom\n")[0]


AGENTS = {
    "well": 'for line in sys.stdin: print(\'hello\\n\\x1e{"kind": "facts", "cores": 5}\', flush=True)',
    "silent": "time.sleep(60)",
    "stuck": "time.sleep(60)",
    "gone": "raise SystemExit('Permission denied')",
}


def test_one_host_that_fails_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def command(host: str, _command: list[str]) -> tuple[list[str], None]:
        beat = "" if host == "silent" else 'print(\'\\x1e{"kind": "beat"}\', flush=True)'
        return [sys.executable, "-c", f"import sys, time\n{beat}\n{AGENTS[host]}"], None

    monkeypatch.setattr("zerovision.launch.nodes.SHELLS", {"ssh": command})
    for limit, seconds in {"REACH_SECONDS": 2.0, "FACTS_SECONDS": 1.0}.items():
        monkeypatch.setattr(f"zerovision.launch.doctor.{limit}", seconds)
    with closing(Nodes("ssh")) as nodes:
        request = Request(dict.fromkeys(AGENTS, 1), "ssh", TrainConfig(log_dir=str(tmp_path)))
        hosts, rows = _facts(nodes, request)
    assert {host: facts["cores"] for host, facts in hosts.items()} == {"well": 5}
    assert {row.host: row.found for row in rows} == {
        **{"silent": "no answer within 2 s", "stuck": "no answer within 1 s", "gone": "ssh wants a password"}
    }


def test_versions_tell_only_what_differs() -> None:
    well: dict[str, Any] = {"software": {"Python": "3.11.7", "torch": "2.15.0", "code": "12345"}}
    old = {"software": well["software"] | {"torch": "2.14.0"}}
    rows = assess_versions({"a": well, "b": old}, well["software"])
    assert [(row.host, row.found) for row in rows] == [("b", "torch 2.14.0 (elsewhere 2.15.0)")]
    assert assess_versions({"b": old}, well["software"]) == rows
    assert [row.host for row in assess_versions({"b": old, "c": old}, well["software"])] == ["here"]
    assert [row.verdict for row in assess_versions({"a": well}, well["software"])] == ["ok"]


@pytest.mark.parametrize(
    ("found", "expected"),
    [({}, [("ok", "")]), ({"b": "why"}, [("wrong", "b")]), ({"a": "why", "b": "why"}, [("wrong", "b")])],
)
def test_a_log_folder_that_is_not_shared(
    found: dict[str, str], expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that do not share it either may be the odd one."""
    monkeypatch.setattr("zerovision.launch.doctor.unshared", lambda nodes, hosts, folder: dict(found))
    rows = _examine_shared_logs(Nodes("ssh"), "/logs", {host: {"log_folder": {"problem": None}} for host in "ab"})
    assert [(row.verdict, row.host) for row in rows] == expected
    assert all("--log-dir" in row.cure for row in rows if row.verdict == "wrong")


def test_data_that_differs_or_is_absent() -> None:
    same, other, absent = ({"data": {"hash": hash_, "holds": "9"}} for hash_ in "12x")
    absent = {"data": {"problem": "no folder '/data'"}}  # the row of that machine says so
    assert [row.verdict for row in assess_copies({"a": same, "b": same, "c": absent})] == ["ok"]
    rows = assess_copies({"a": same, "b": other, "c": same})
    assert [(row.host, row.verdict) for row in rows] == [("b", "wrong")]
    assert assess_copies({"a": {"data": {}}}) == []


@pytest.mark.parametrize(
    ("failed", "guilty"),
    [
        (("ba", "ca", "da"), ["a"]),  # nobody reaches a
        (("ba", "ab", "bc"), ["b"]),  # b drops answers too
        (("ab",), ["b"]),  # one way: the end that does not answer
        ((), []),
    ],
)
def test_the_host_in_most_paths_that_fail_is_named(failed: tuple[str, ...], guilty: list[str]) -> None:
    """'ab' is a path from a to b that fails."""
    rows = assess_paths([(source, target, 29500) for source, target in failed])
    assert [(row.check, row.verdict, row.host) for row in rows] == [("connections", "wrong", host) for host in guilty]
    assert all(f"{source} cannot connect to {target}, port 29500" in rows[0].found for source, target in failed)


def test_paths_to_real_ports() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = [open_port("b", {"addresses": {"b": "127.0.0.1"}})["port"], closed.getsockname()[1]]
        failed = try_paths("a", {"targets": {"a": [["b", "127.0.0.1", port] for port in ports]}})["failed"]
    assert failed == [("a", "b", ports[1])]


def measured(host: str, *ranks: tuple[str, int], port: int, seconds: float) -> dict[str, Any]:
    common = {"ranks": ranks, "address": "127.0.0.1", "port": port, "run_id": "r", "use_gpu": False}
    limits = {"interfaces": {host: ""}, "join_seconds": seconds, "seconds": 2 * seconds}
    return measure_network(host, {**common, **limits})


def test_two_real_ranks_measure_their_network() -> None:
    answer = measured("here", ("here", 2), port=free_port(), seconds=10.0)
    assert answer["backend"] == "gloo"
    assert 0 < answer["seconds"] < 20
    assert assess_all_reduce({"here": answer}, 2, "within one machine").verdict == "ok"


def test_a_rank_that_nobody_meets_is_a_row() -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        answer = measured("b", ("a", 1), ("b", 1), port=taken.getsockname()[1], seconds=0.5)
    row = assess_all_reduce({"a": {}, "b": answer}, 2, "")
    assert (row.verdict, row.host) == ("wrong", "b")
    assert answer["problem"] in row.found


def test_the_rate_is_that_of_nccls_tests() -> None:
    answer = {"backend": "gloo", "bytes": 4_000_000, "seconds": 0.01}
    row = assess_all_reduce({"a": answer, "b": answer}, 4, "over eth0")
    assert row.found == "4 ranks, gloo over eth0: 4 MB at 600 MB/s"


def test_rows_of_several_hosts_are_joined() -> None:
    rows = [Row("GPUs", "ok", "8 x H100", "", host) for host in "ab"]
    rows += [Row("GPUs", "wrong", "no GPU", "add one", host) for host in "cdefgh"]
    rows.append(Row("memory", "ok", "1 GB", "", "a"))
    assert join_hosts(rows) == [
        Row("GPUs", "ok", "8 x H100", "", "a, b"),
        Row("GPUs", "wrong", "no GPU", "add one", "c, d, e, f and 2 more"),
        Row("memory", "ok", "1 GB", "", "a"),
    ]
    assert some_of(["a"]) == "a"


def test_what_a_training_saves_is_counted_where_its_data_are() -> None:
    flags = ["--model-type=basic_cnn", "--optimizer=adamw"]
    module = new_model("basic_cnn", num_classes=10, image_size=32).module
    expected = 4 * 4 * sum(one.numel() for one in module.parameters())  # the weights twice, two moments
    assert data_facts({"data": "digits"}, flags)["saved_bytes"] == expected
    assert data_facts({"data": "digits"}, ["--model-type=nonsense"])["saved_bytes"] == 0


@pytest.mark.slow  # two agents and two ranks; of one machine: test_doctor.py
@pytest.mark.skipif(not own_addresses(), reason="no network here")
def test_agents_of_this_machine_are_examined_as_hosts(tmp_path: Path) -> None:
    config = TrainConfig(data="digits", log_dir=str(tmp_path))
    with closing(Nodes("local")) as nodes:
        rows = examine(Request({"a": 1, "b": 1}, "local", config, has_data=True), nodes)
    assert [(row.check, row.host) for row in rows if row.verdict == "wrong"] == []
    found = {row.check: row.found for row in rows}
    expected = ["hosts", "versions", "same data", "shared logs", "GPUs", "log folder", "data", "all-reduce"]
    assert {*expected} <= found.keys()
    assert found["all-reduce"].startswith("2 ranks, gloo over ")
    assert list(tmp_path.iterdir()) == []
