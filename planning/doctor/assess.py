"""Turns the findings into the rows of the doctor's table, in its order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from launch.cluster.agreement import differences
from planning.doctor.assess_machine import CHECKS, Need, assess_locks, assess_packages, read_pins
from planning.doctor.assess_network import assess_network, assess_paths, assess_step
from planning.doctor.collect import Findings, Request
from planning.doctor.table import Row, join_hosts, some_of
from training.config import REPO_ROOT
from training.observe.environment import usual_value
from training.parallel.network_interfaces import is_loopback
from training.parallel.strategies import STRATEGIES

CLOCK_WARNING_SECONDS, CLOCK_WRONG_SECONDS = 1.0, 60.0
SHORT = 12  # digits of a hash
BAD_FILES_NAMED = 3

HostFacts = Mapping[str, Mapping[str, Any]]


def assess(request: Request, found: Findings) -> list[Row]:
    """Return all rows; equal rows of several hosts are one row."""
    rows = [Row("hosts", "wrong", str(error), error.cure, host) for host, error in found.lost.items()]
    rows += assess_identity(found.hosts)
    if not request.is_alone:
        rows = rows or [Row("hosts", "ok", f"{some_of(list(request.slots))} answer")]
        rows += assess_names(found.hosts)
        if found.here and found.hosts:
            rows += assess_versions(found.hosts, found.here) + assess_code(found.hosts, found.here)
        rows += assess_fingerprints(found.fingerprints)
        rows += assess_log_sharing(found.log_writer, found.sees_log) + assess_clocks(found.clock_offsets)
    rows += _assess_machines(request, found)
    if found.dataset:
        rows += assess_dataset(request.config.data, found.dataset, found.model, request.slots[found.dataset["host"]])
    if "problem" in found.model:
        rows.append(Row("model", "wrong", found.model["problem"], "correct --model-type"))
    if found.network:
        rows += _assess_connections(request, found)
    if request.is_alone:
        rows = [replace(row, host="") for row in rows]
    return join_hosts(rows)


def _assess_machines(request: Request, found: Findings) -> list[Row]:
    """Assess each machine for itself; the rows of one check follow each other."""
    pins = read_pins((REPO_ROOT / "requirements.txt").read_text())
    rows = []
    if found.here and not request.is_alone:
        rows.append(assess_packages(found.here, pins))
    for host, facts in found.hosts.items():
        packages = assess_packages(facts, pins)
        # The row of the versions says already whether a host has the same as this machine.
        if request.is_alone or packages.verdict == "wrong":
            rows.append(replace(packages, host=host))
    needs = {
        host: Need(
            ranks=request.slots[host],
            all_ranks=sum(request.slots.values()),
            parameters=found.model.get("parameters"),
            keep_last=request.config.keep_last,
            cluster_has_gpus=any(facts["gpus"] for facts in found.hosts.values()),
        )
        for host in found.hosts
    }
    checked = ((host, check(facts, needs[host])) for check in CHECKS for host, facts in found.hosts.items())
    rows += [replace(row, host=host) for host, row in checked if row]
    rows.append(assess_locks(facts["locks"] for facts in (found.here, *found.hosts.values()) if facts))
    return rows + assess_port(found.hosts, request.port)


def _assess_connections(request: Request, found: Findings) -> list[Row]:
    rows = assess_paths(found.failed_paths) or assess_network(found.network, found.interfaces)
    reports = [answer["report"] for answer in found.network.values() if "report" in answer]
    # CPU ranks of one machine share memory and send nothing (training.parallel.flat_buffers).
    sends = len(request.slots) > 1 or any(report["backend"] == "nccl" for report in reports)
    if reports and "parameters" in found.model and sends:
        name = f"{request.config.model_type}, {request.config.strategy}"
        stage = STRATEGIES[request.config.strategy].zero_stage
        rows.append(assess_step(reports[0], name, found.model["parameters"], stage))
    return rows


def assess_identity(hosts: HostFacts) -> list[Row]:
    """Name the hosts that are one machine, whose ranks would share its cores and GPUs."""
    first_names: dict[str, str] = {}
    rows = []
    for host, facts in hosts.items():
        if (first := first_names.setdefault(facts["machine"], host)) != host:
            found = f"the same machine as {first}: their ranks would share its cores and GPUs"
            rows.append(Row("hosts", "wrong", found, "take one of the names out", host))
    return rows


def assess_names(hosts: HostFacts) -> list[Row]:
    """Name the hosts on which names resolve to another machine. Our launchers use addresses, others names."""
    if not hosts:
        return []
    first = next(iter(hosts))
    rows = []
    for host, facts in hosts.items():
        address, own_address = facts["addresses"].get(first), facts["addresses"].get(host)
        if address is None:
            cure = f"for torchrun or deepspeed by hand: add {first} to the DNS, or to /etc/hosts of {host}"
            rows.append(Row("names", "warning", f"{first} has no address there", cure, host))
        elif host != first and is_loopback(address):
            cure = f"for torchrun or deepspeed by hand: give {first} its own address in /etc/hosts of {host}"
            rows.append(Row("names", "warning", f"{first} is {address} there: {host} itself", cure, host))
        if own_address and is_loopback(own_address):
            found = f"calls itself {own_address}, which no other machine can reach (Debian's /etc/hosts does so)"
            cure = "our launchers choose the interface themselves; for any other start take the line out of /etc/hosts"
            rows.append(Row("names", "warning", found, cure, host))
    return rows or [Row("names", "ok", f"every host finds {first}, where the ranks meet, by its name")]


def assess_versions(hosts: HostFacts, here: Mapping[str, Any]) -> list[Row]:
    """Compare the versions of Python and the libraries; name what differs, and the hosts."""
    software = {
        host: {"Python": facts["python"], **{name: found or "none" for name, found in facts["packages"].items()}}
        for host, facts in {**hosts, "here": here}.items()
    }
    cure = "make setup in the repository on {host}, or share one environment"
    differing = differences(software, software["here"])
    rows = [Row("versions", "wrong", found, cure.format(host=host), host) for host, found in differing.items()]
    same = ", ".join(f"{name} {version}" for name, version in software["here"].items())
    return rows or [Row("versions", "ok", f"{same} on every host")]


def assess_code(hosts: HostFacts, here: Mapping[str, Any]) -> list[Row]:
    """Compare the code that runs, uncommitted changes included."""
    commits = {facts["code"]: facts["commit"] for facts in (here, *hosts.values())}

    def show(code: str) -> str:
        return f"commit {(commits[code] or 'unknown')[:SHORT]}, files {code[:SHORT]}"

    cure = "bring {host} to the same commit (git status, git pull), or share the repository's folder"
    return assess_sameness("code", {host: facts["code"] for host, facts in hosts.items()}, here["code"], cure, show)


def assess_sameness(
    check: str, values: Mapping[str, Any], here: Any, cure: str, show: Callable[[Any], str] = str
) -> list[Row]:
    """Name the hosts whose value differs from most machines'; this machine's decides a tie.

    Args:
        check: name of the row.
        values: by host.
        here: this machine's; None if it is not compared.
        cure: what to do, with {host}.
        show: formats a value.
    """
    everyone = {**values, **({} if here is None else {"here": here})}
    usual = usual_value(list(everyone.values()), here)
    rows = [
        Row(check, "wrong", f"{show(value)}, elsewhere {show(usual)}", cure.format(host=host), host)
        for host, value in everyone.items()
        if value != usual
    ]
    return rows or [Row(check, "ok", f"{show(usual)} on every host")]


def assess_fingerprints(fingerprints: HostFacts) -> list[Row]:
    """Compare the hosts' copies of the data set; this machine may have none."""
    values = {host: (answer["hash"], answer["covers"]) for host, answer in fingerprints.items() if "hash" in answer}
    absent = "put the data set there at the same path, or share the folder"
    problems = {host: answer["problem"] for host, answer in fingerprints.items() if "problem" in answer}
    rows = [Row("same data", "wrong", problem, absent, host) for host, problem in problems.items()]
    if values:
        cure = "copy the data set to {host} anew, or share its folder; only you know which of two copies is right"
        same = assess_sameness("same data", values, None, cure, lambda value: f"{value[1]} {value[0][:SHORT]}".rstrip())
        rows += [row for row in same if row.verdict != "ok" or not rows]
    return rows


def assess_log_sharing(writer: str, sees: Mapping[str, bool]) -> list[Row]:
    """Assess whether all hosts share the log folder: whether they see the file that `writer` has written there.

    If none of several others sees it, the writer is the odd one.
    """
    if not sees:
        return []
    cure = "give a --log-dir on a disk that all hosts share, or mount it there"
    blind = [host for host, is_seen in sees.items() if not is_seen]
    if len(blind) == len(sees) > 1:
        found = f"what it writes into the log folder does not appear on {some_of(blind)}"
        return [Row("shared logs", "wrong", found, cure, writer)]
    found = f"what {writer} writes into the log folder does not appear there"
    rows = [Row("shared logs", "wrong", found, cure, host) for host in blind]
    return rows or [Row("shared logs", "ok", f"what {writer} writes into the log folder appears on every host")]


def assess_clocks(offsets: Mapping[str, float]) -> list[Row]:
    """Compare the clocks with the median if there are several hosts, else with this machine's."""
    if not offsets:
        return []
    usual = sorted([0.0, *offsets.values()])[(len(offsets) + 1) // 2] if len(offsets) > 1 else 0.0
    rows = []
    for host, offset in {**offsets, "here": 0.0}.items():
        off = offset - usual
        if abs(off) > CLOCK_WARNING_SECONDS:
            found = f"the clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}"
            cure = "set it: timedatectl set-ntp true, or chronyc makestep"
            rows.append(Row("clock", "wrong" if abs(off) > CLOCK_WRONG_SECONDS else "warning", found, cure, host))
    worst = max(abs(offset - usual) for offset in offsets.values())
    return rows or [Row("clock", "ok", f"at most {worst * 1000:.0f} ms apart")]


def assess_port(hosts: HostFacts, port: int) -> list[Row]:
    """Assess the port on the first host, where the ranks meet."""
    if not hosts:
        return []
    first = next(iter(hosts))
    if not port:
        return [Row("port", "ok", "none asked for: the launchers take one that is free", "", first)]
    if hosts[first]["port"]:
        return [Row("port", "ok", f"{port} is free", "", first)]
    cure = f"give another one with --master-port, or none; ss -ltnp sport = :{port} names who has it"
    return [Row("port", "wrong", f"{port} is taken", cure, first)]


def assess_dataset(name: str, measured: Mapping[str, Any], model: Mapping[str, Any], ranks: int) -> list[Row]:
    """Assess `workload.measure_dataset` of a host, and its rate against `workload.measure_model` (may be empty)."""
    host = measured["host"]
    if "late" in measured:
        cure = "training will wait as long: fewer, larger files, or a disk of the machine's own; --check-data has time"
        return [Row("data", "warning", f"{name} could not be examined: {measured['late']}", cure, host)]
    if "problem" in measured:
        return [Row("data", "wrong", measured["problem"], "correct --data, or put the data set there", host)]
    images = measured["train"] + measured["val"]
    sample = "all" if measured["decoded"] == images else f"a sample of {measured['decoded']}"
    counts = f"{measured['train']} + {measured['val']} images"
    found = f"{name}: {measured['classes']} classes, {counts}, {sample} decoded"
    bad = measured["unreadable"]
    if bad:
        more = f" and {len(bad) - BAD_FILES_NAMED} more" if len(bad) > BAD_FILES_NAMED else ""
        found = f"{found}; unreadable: {', '.join(bad[:BAD_FILES_NAMED])}{more}"
        cure = "repair or remove them: scripts/doctor.py --check-data lists all; or train with --bad-images skip"
        return [Row("data", "wrong", found, cure, host)]
    return [Row("data", "ok", found, "", host), _assess_read_rate(measured, model, ranks)]


def _assess_read_rate(measured: Mapping[str, Any], model: Mapping[str, Any], ranks: int) -> Row:
    rate, host = measured["images_per_second"], measured["host"]
    found = f"{rate:.0f} images/s a worker ({'in memory' if measured['in_memory'] else 'decoded'})"
    if not model.get("images_per_second"):
        return Row("reading", "ok", found, "", host)
    workers = max(model["cores"] // max(ranks, 1) - 1, 1)
    trained = model["images_per_second"]
    found = f"{found}; a rank on {model['device']} takes {trained:.0f} images/s, and has {workers} core(s) for workers"
    if workers * rate >= trained or measured["in_memory"]:
        return Row("reading", "ok", found, "", host)
    cure = "the GPUs will wait for data: smaller files, --cache ram or disk, or more cores"
    return Row("reading", "warning", found, cure, host)
