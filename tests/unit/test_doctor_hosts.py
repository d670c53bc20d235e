"""How the doctor tells hosts apart: who differs, who cannot be reached and why, whose clock or link is off."""

from __future__ import annotations

import socket
import sys
import threading
from typing import Any

import pytest

from planning.doctor import assess, assess_network, probe, tcp_paths
from planning.doctor.collect import Findings, _add_host
from planning.doctor.network import measure_network, rounds_of_pairs
from planning.doctor.probe import MOST_PATIENCE, Probe, Unreachable, ask_all, explain, slowdown, stuck_at
from planning.doctor.table import Row, join_hosts, some_of
from training.parallel.network_interfaces import free_port

COMPLAINTS = {
    "ssh: Could not resolve hostname node09: Name or service not known": "no such host name",
    "ssh: connect to host node01 port 22: Connection refused": "connection refused",
    "ssh: connect to host node01 port 22: Connection timed out": "timed out",
    "Connection timed out during banner exchange\nConnection to 10.0.0.1 port 22 timed out": "timed out",
    "ssh: connect to host node01 port 22: No route to host": "no route",
    "No ED25519 host key is known for node01 and you have requested strict checking.\n"
    "Host key verification failed.": "host key is unknown",
    "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.": "another one",
    "root@node01: Permission denied (publickey,password).": "wants a password",
    "kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.1 port 22": "closed",
    "/x/.venv/bin/python: can't open file '/x/scripts/doctor.py': [Errno 2] No such file or directory": "repository",
}


@pytest.mark.parametrize(("complaint", "said"), COMPLAINTS.items())
def test_why_a_host_cannot_be_reached(complaint: str, said: str) -> None:
    error = explain("node01", 2 if "doctor.py" in complaint else 255, complaint)
    assert said in str(error)
    assert error.cure


def test_a_missing_environment_and_anything_else() -> None:
    assert sys.executable in str(explain("node01", 127, f"bash: line 1: {sys.executable}: No such file or directory"))
    assert "ended with code 3: boom" in str(explain("node01", 3, "Traceback\nboom\n"))


def test_one_probe_that_fails_does_not_keep_the_others() -> None:
    echo = "import sys\nfor line in sys.stdin: print('hello\\n\\x1e{\"time\": 5.0}', flush=True)"
    with (
        Probe("well", ([sys.executable, "-c", echo], None)) as well,
        Probe("silent", ([sys.executable, "-c", "import time; time.sleep(60)"], None)) as silent,
        Probe("gone", ([sys.executable, "-c", "raise SystemExit('Permission denied')"], None)) as gone,
    ):
        silent.patience = 1.0
        answers, lost = ask_all([well, silent, gone], lambda probe: probe.ask("time", 1.0))
    assert answers == {"well": {"time": 5.0}}
    assert {host: str(error) for host, error in lost.items()} == {
        "silent": "no answer within 1 s",
        "gone": "ssh wants a password",
    }
    assert all(isinstance(error, Unreachable) for error in lost.values())


def test_the_host_that_differs_is_named_and_a_tie_is_decided_here() -> None:
    rows = assess.assess_sameness("code", {"a": "x", "b": "y", "c": "x"}, "x", "cure {host}")
    assert rows == [Row("code", "wrong", "y, elsewhere x", "cure b", "b")]
    assert [row.host for row in assess.assess_sameness("code", {"a": "x"}, "y", "")] == ["a"]
    assert [row.host for row in assess.assess_sameness("code", {"a": "x", "b": "x"}, "y", "")] == ["here"]
    assert assess.assess_sameness("code", {"a": "x", "b": "x"}, "x", "")[0].verdict == "ok"


def test_versions_tell_only_what_differs() -> None:
    well: dict[str, Any] = {"python": "3.11.7", "packages": {"torch": "2.15.0", "timm": "1.0.31"}}
    old = well | {"packages": {"torch": "2.14.0", "timm": "1.0.31"}}
    rows = assess.assess_versions({"a": well, "b": old}, well)
    assert [(row.host, row.found) for row in rows] == [("b", "torch 2.14.0 (elsewhere 2.15.0)")]
    assert assess.assess_versions({"b": old}, well) == rows
    assert [row.host for row in assess.assess_versions({"b": old, "c": old}, well)] == ["here"]


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ({"a": 0.01, "b": -0.2}, [("ok", "")]),
        ({"a": 0.0, "b": 1.5}, [("warning", "b")]),
        ({"a": 0.0, "b": -61.0}, [("wrong", "b")]),
        ({"a": 90.0, "b": 90.1, "c": 90.0}, [("wrong", "here")]),  # this machine is the one that is off
    ],
)
def test_clocks(offsets: dict[str, float], expected: list[tuple[str, str]]) -> None:
    assert [(row.verdict, row.host) for row in assess.assess_clocks(offsets)] == expected


@pytest.mark.parametrize(
    ("sees", "expected"),
    [
        ({}, []),
        ({"b": True, "c": True}, [("ok", "")]),
        ({"b": True, "c": False}, [("wrong", "c")]),
        ({"b": False}, [("wrong", "b")]),
        ({"b": False, "c": False}, [("wrong", "a")]),  # more likely one than two
    ],
)
def test_a_log_folder_that_is_not_shared(sees: dict[str, bool], expected: list[tuple[str, str]]) -> None:
    rows = assess.assess_log_sharing("a", sees)
    assert [(row.verdict, row.host) for row in rows] == expected
    assert all("--log-dir" in row.cure for row in rows if row.verdict == "wrong")


def test_names_that_lead_elsewhere_are_explained() -> None:
    found = {
        "a": {"addresses": {"a": "127.0.1.1", "b": "10.0.0.2"}},
        "b": {"addresses": {"a": None, "b": "10.0.0.2"}},
        "c": {"addresses": {"a": "127.0.0.1", "c": "10.0.0.3"}},
    }
    rows = assess.assess_names(found)
    assert [(row.host, row.verdict) for row in rows] == [("a", "warning"), ("b", "warning"), ("c", "warning")]
    assert "127.0.1.1" in rows[0].found
    well = {host: {"addresses": {"a": "10.0.0.1", "b": "10.0.0.2"}} for host in "ab"}
    assert [row.verdict for row in assess.assess_names(well)] == ["ok"]


def test_the_port_matters_on_the_first_host_only() -> None:
    facts = {"a": {"port": 29500}, "b": {"port": 0}}
    assert assess.assess_port(facts, 29500)[0].verdict == "ok"
    assert assess.assess_port({"b": {"port": 0}, "a": {"port": 29500}}, 29500)[0].host == "b"
    assert assess.assess_port({"b": {"port": 0}}, 0)[0].verdict == "ok"


def test_data_that_differs_or_is_absent() -> None:
    same = {"hash": "1", "covers": "9 entries"}
    rows = assess.assess_fingerprints({"a": same, "b": same, "c": {"problem": "no folder '/data'"}})
    assert [(row.host, row.verdict) for row in rows] == [("c", "wrong")]
    rows = assess.assess_fingerprints({"a": same, "b": {"hash": "2", "covers": "9 entries"}, "c": same})
    assert [(row.host, row.verdict) for row in rows] == [("b", "wrong")]


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_every_pair_of_hosts_meets_once_and_no_host_twice_in_a_round(count: int) -> None:
    rounds = rounds_of_pairs(count)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(first, second) for first in range(count) for second in range(first + 1, count)]
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in rounds)


def test_a_slow_host_is_told_from_its_partners() -> None:
    speeds = [["a", "b", 1e6], ["a", "c", 1e9], ["b", "c", 1.1e6]]
    rows = assess_network.assess_links(speeds, {})
    assert [(row.verdict, row.host) for row in rows] == [("warning", "b")]
    assert assess_network.assess_links([["a", "b", 1e9], ["a", "c", 5e8], ["b", "c", 8e8]], {})[0].verdict == "ok"
    # two hosts cannot be told apart, but the interface says what to expect: 10 Gbit/s
    assert assess_network.assess_links([["a", "b", 1e7]], {"a": 1.25e9, "b": 1.25e9})[0].verdict == "warning"
    assert assess_network.assess_links([["a", "b", 1e7]], {"a": 0, "b": 1.25e9})[0].verdict == "ok"


def test_a_steps_communication_follows_the_zero_paper() -> None:
    report = {"large": [4_000_000, 0.01], "small": [1024, 0.001]}
    # an all-reduce of 1,000,000 fp32 values takes 10 ms; 3,000,000 parameters: 30 ms, half as much again at stage 3
    assert "24 MB a rank and step, about 31 ms" in assess_network.assess_step(report, "vgg", 3_000_000, 1).found
    assert "36 MB a rank and step, about 46.5 ms" in assess_network.assess_step(report, "vgg", 3_000_000, 3).found
    assert assess_network.bus_bandwidth(4_000_000, 0.01, 4) == pytest.approx(6e8)


def test_hosts_that_did_not_come_as_far_as_the_others_are_blamed() -> None:
    stuck = {"problem": "timeout", "phase": "join"}
    answers = {"a": stuck, "b": {"problem": "timeout", "phase": "meet"}, "c": stuck}
    rows = assess_network.assess_network(answers, {})
    assert [(row.verdict, row.host) for row in rows] == [("wrong", "b")]


def failing(*ends: str, lacks: str = tcp_paths.CONNECTION) -> list[tcp_paths.FailedPath]:
    """'ab' is a path from a to b that fails."""
    return [tcp_paths.FailedPath(source, target, 29500, lacks) for source, target in ends]


@pytest.mark.parametrize(
    ("failed", "guilty"),
    [
        (failing("ba", "ca", "da"), ["a"]),  # nobody reaches a
        (failing("ab", "ac", "ad"), ["a"]),  # a reaches nobody
        (failing("ab"), ["b"]),  # one way: the end that does not answer
        (failing("ab", "ba"), ["a or b"]),  # both ways: nothing tells them apart
        (failing("ab", "ba", "bc", "cb", lacks=tcp_paths.LARGE_MESSAGES), ["b"]),
        (failing("ba", "ca", "da", "ed"), ["a", "d"]),
        ([], []),
    ],
)
def test_the_hosts_that_all_failing_paths_have_in_common_are_named(
    failed: list[tcp_paths.FailedPath], guilty: list[str]
) -> None:
    rows = assess_network.assess_paths(failed)
    assert [(row.check, row.verdict, row.host) for row in rows] == [("all-reduce", "wrong", host) for host in guilty]


def test_paths_to_real_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_paths, "ECHO_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as deaf, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = [tcp_paths.open_ports("127.0.0.1", 0)["ports"][-1], closed.getsockname()[1], deaf.getsockname()[1]]
        failed = tcp_paths.try_paths("a", [["b", "127.0.0.1", ports]])["failed"]
    assert failed == [
        tcp_paths.FailedPath("a", "b", ports[1], tcp_paths.CONNECTION),
        tcp_paths.FailedPath("a", "b", ports[2], tcp_paths.ANSWER),
    ]
    assert tcp_paths.targets_of("c", "abcd") == ["a", "d", "b"]
    assert len(tcp_paths.targets_of("c", [str(number) for number in range(99)] + ["c"])) == tcp_paths.MOST_TARGETS


def test_ssh_that_times_out_at_a_port_that_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SSH_BANNER_SECONDS", 1.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "says nothing" in str(stuck_at("a", "127.0.0.1", port))
        server.accept()[0].close()  # the connection of before
        greeter = threading.Thread(target=lambda: server.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.2\r\n"))
        greeter.start()
        assert "packets of full size" in str(stuck_at("a", "127.0.0.1", port))
        greeter.join()
    assert stuck_at("a", "127.0.0.1", port) is None  # closed: nobody is stuck, ssh itself says why


def test_a_loaded_machine_has_more_time_to_answer() -> None:
    late = (
        "import sys, time\n"
        'sys.stdin.readline(); print(\'\\x1e{"time": 0, "slowdown": 30.0}\', flush=True)\n'
        'for line in sys.stdin: time.sleep(1.2); print(\'\\x1e{"time": 0, "slowdown": 1.0}\', flush=True)\n'
    )
    with Probe("loaded", ([sys.executable, "-c", late], None)) as probe:
        probe.patience = 1.0
        probe.clock_offset()
        assert probe.patience == MOST_PATIENCE
        assert probe.ask("time", 0.6)["time"] == 0
    assert 1 <= slowdown() < 1000


def test_names_of_one_machine_are_told_from_two_machines() -> None:
    facts = {"a": {"machine": "1"}, "b": {"machine": "2"}, "c": {"machine": "1"}}
    assert [(row.host, row.found[:22]) for row in assess.assess_identity(facts)] == [("c", "the same machine as a:")]


def measured(port: int, host: str, *ranks: tuple[str, int], join_seconds: float) -> dict[str, Any]:
    common = {"ranks": ranks, "address": "127.0.0.1", "port": port, "secret": "s", "use_gpu": False}
    return measure_network(host, {**common, "join_seconds": join_seconds}, interface="", seconds=20.0)


def test_two_real_ranks_measure_their_network() -> None:
    answer = measured(free_port(), "here", ("here", 2), join_seconds=10.0)
    report = answer["report"]
    assert (report["ranks"], report["backend"], report["links"]) == (2, "gloo", [])
    assert 0 < report["small"][1] < report["large"][1] < 20
    assert assess_network.assess_network({"here": answer}, {})[0].verdict == "ok"


def test_a_rank_that_nobody_meets_reports_its_phase() -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        answer = measured(taken.getsockname()[1], "b", ("a", 1), ("b", 1), join_seconds=1.0)
    assert (answer["phase"], bool(answer["problem"])) == ("meet", True)


def test_rows_of_several_hosts_are_joined() -> None:
    rows = [Row("GPUs", "ok", "8 x H100", "", host) for host in "ab"]
    rows += [Row("GPUs", "wrong", "no GPU", "add one", host) for host in "cdefgh"] + [
        Row("memory", "ok", "1 GB", "", "a")
    ]
    assert join_hosts(rows) == [
        Row("GPUs", "ok", "8 x H100", "", "a, b"),
        Row("GPUs", "wrong", "no GPU", "add one", "c, d, e, f and 2 more"),
        Row("memory", "ok", "1 GB", "", "a"),
    ]
    assert some_of(["a"]) == "a"


def test_a_host_with_another_doctor_is_put_aside() -> None:
    found = Findings(here={"a": 1, "b": 2})
    for host, facts in {"x": {"a": 1, "b": 2}, "y": {"a": 1}}.items():
        _add_host(found, host, {"facts": facts, "offset": 0.0, "fingerprint": {}})
    assert (list(found.hosts), list(found.clock_offsets), list(found.fingerprints)) == (["x"], ["x"], ["x"])
    assert list(found.lost) == ["y"]
