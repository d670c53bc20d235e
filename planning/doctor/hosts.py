"""What differs between the machines: pure functions from all machines' facts to rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planning.doctor.table import Row, Verdict, some_of
from training.observe.environment import usual_value
from training.parallel.network_interfaces import is_loopback

CLOCK_WARNING_SECONDS, CLOCK_WRONG_SECONDS = 1.0, 60.0
SHORT = 12  # of a hash

AllFacts = Mapping[str, Mapping[str, Any]]


def judge_names(facts: AllFacts) -> list[Row]:
    """Names that lead elsewhere. Our launchers let the ranks meet by addresses: others do it by names."""
    if not facts:
        return []
    first = next(iter(facts))
    rows = []
    for host, own in facts.items():
        address = own["addresses"].get(first)
        if address is None:
            cure = f"for torchrun or deepspeed by hand: add {first} to the DNS, or to /etc/hosts of {host}"
            rows.append(Row("names", "warning", f"{first} has no address there", cure, host))
        elif host != first and is_loopback(address):
            cure = f"for torchrun or deepspeed by hand: give {first} its own address in /etc/hosts of {host}"
            rows.append(Row("names", "warning", f"{first} is {address} there: {host} itself", cure, host))
        own_address = own["addresses"].get(host)
        if own_address and is_loopback(own_address):
            found = f"calls itself {own_address}, which no other machine can reach (Debian's /etc/hosts does so)"
            cure = "our launchers choose the interface themselves; for any other start take the line out of /etc/hosts"
            rows.append(Row("names", "warning", found, cure, host))
    return rows or [Row("names", "ok", f"every host finds {first}, where the ranks meet, by its name")]


def judge_identity(facts: AllFacts) -> list[Row]:
    """Several names of one machine, whose ranks would share its cores and GPUs."""
    names: dict[str, list[str]] = {}
    for host, own in facts.items():
        names.setdefault(own["machine"], []).append(host)
    return [
        Row(
            "hosts",
            "wrong",
            f"the same machine as {same[0]}: their ranks would share its cores and GPUs",
            "take one of the names out",
            other,
        )
        for same in names.values()
        for other in same[1:]
    ]


def judge_sameness(
    check: str, values: Mapping[str, Any], here: Any, cure: str, show: Callable[[Any], str] = str
) -> list[Row]:
    """Name the hosts whose value is another than most machines have; a tie is decided by this machine's.

    Args:
        check: name of the row.
        values: by host.
        here: this machine's; None where it has none to compare.
        cure: what to do, with {host}.
        show: writes a value.
    """
    if not values:
        return []
    usual = usual_value([*values.values(), *([here] if here is not None else [])], here)
    others = {host: value for host, value in values.items() if value != usual}
    rows = [
        Row(check, "wrong", f"{show(value)}, elsewhere {show(usual)}", cure.format(host=host), host)
        for host, value in others.items()
    ]
    if here is not None and here != usual:
        rows.append(Row(check, "wrong", f"{show(here)}, elsewhere {show(usual)}", cure.format(host="here"), "here"))
    return rows or [Row(check, "ok", f"{show(usual)} on every host")]


def versions(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what must be the same: 'Python 3.11.7', 'torch 2.15.0', ..."""
    return (f"Python {facts['python']}", *(f"{name} {version}" for name, version in facts["packages"].items()))


def judge_versions(facts: AllFacts, here: Mapping[str, Any]) -> list[Row]:
    """Python and the libraries; of a host that differs only what differs is told."""
    own = {host: versions(answer) for host, answer in facts.items()}
    cure = "make setup in the repository on {host}, or share one environment"
    rows = judge_sameness("versions", own, versions(here), cure, show=lambda value: ", ".join(value))
    everyone = {**own, "here": versions(here)}
    if not own:
        return []
    usual = usual_value(list(everyone.values()), versions(here))
    return [_only_differences(row, everyone[row.host], usual) if row.verdict == "wrong" else row for row in rows]


def _only_differences(row: Row, own: tuple[str, ...], usual: tuple[str, ...]) -> Row:
    pairs = zip(own, usual, strict=True)
    found = ", ".join(f"{value} (elsewhere {other.split()[-1]})" for value, other in pairs if value != other)
    return Row(row.check, row.verdict, found, row.cure, row.host)


def judge_code(facts: AllFacts, here: Mapping[str, Any]) -> list[Row]:
    """The code that runs, with whatever was changed and not committed."""
    commits = {answer["code"]: answer["commit"] for answer in (here, *facts.values())}

    def show(code: str) -> str:
        return f"commit {(commits[code] or 'unknown')[:SHORT]}, files {code[:SHORT]}"

    cure = "bring {host} to the same commit (git status, git pull), or share the repository's folder"
    return judge_sameness("code", {host: answer["code"] for host, answer in facts.items()}, here["code"], cure, show)


def judge_fingerprints(fingerprints: AllFacts) -> list[Row]:
    """The data set; this machine's is not compared, because it may have none."""
    absent = "put the data set there at the same path, or share the folder"
    rows = [
        Row("same data", "wrong", answer["problem"], absent, host)
        for host, answer in fingerprints.items()
        if "problem" in answer
    ]
    values = {host: (answer["hash"], answer["covers"]) for host, answer in fingerprints.items() if "hash" in answer}
    cure = "copy the data set to {host} anew, or share its folder (which of two copies is the right one, you must say)"
    same = judge_sameness("same data", values, None, cure, lambda value: f"{value[1]} {value[0][:SHORT]}".rstrip())
    return [*rows, *(row for row in same if row.verdict != "ok" or not rows)]


def judge_log_sharing(writer: str, sees: Mapping[str, bool]) -> list[Row]:
    """Whether the log folder is one for all: on `writer` a file was written there, the others see it or do not.

    If none of several sees it, the writer is the odd one.
    """
    if not sees:
        return []
    blind = [host for host, is_seen in sees.items() if not is_seen]
    cure = "give a --log-dir on a disk that all hosts share, or mount it there"
    if len(blind) > 1 and len(blind) == len(sees):
        found = f"what it writes into the log folder does not appear on {some_of(blind)}"
        return [Row("shared logs", "wrong", found, cure, writer)]
    found = f"what {writer} writes into the log folder does not appear there"
    rows = [Row("shared logs", "wrong", found, cure, host) for host in blind]
    return rows or [Row("shared logs", "ok", f"what {writer} writes into the log folder appears on every host")]


def judge_clocks(offsets: Mapping[str, float]) -> list[Row]:
    """Clocks against this machine's, or where most hosts agree with each other, against theirs."""
    if not offsets:
        return []
    middle = sorted([0.0, *offsets.values()])[(len(offsets) + 1) // 2]
    usual = middle if len(offsets) > 1 else 0.0
    rows = []
    for host, offset in {**offsets, "here": 0.0}.items():
        off = offset - usual
        if abs(off) > CLOCK_WARNING_SECONDS:
            verdict: Verdict = "wrong" if abs(off) > CLOCK_WRONG_SECONDS else "warning"
            found = f"the clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}"
            rows.append(Row("clock", verdict, found, "set it: timedatectl set-ntp true, or chronyc makestep", host))
    worst = max(abs(offset - usual) for offset in offsets.values())
    return rows or [Row("clock", "ok", f"at most {worst * 1000:.0f} ms apart")]


def judge_port(facts: AllFacts, port: int) -> list[Row]:
    """The port on the first host, where the ranks meet."""
    if not facts:
        return []
    first = next(iter(facts))
    if not port:
        return [Row("port", "ok", "none asked for: the launchers take one that is free", "", first)]
    if facts[first]["port"]:
        return [Row("port", "ok", f"{port} is free", "", first)]
    cure = f"give another one with --master-port, or none; ss -ltnp sport = :{port} names who has it"
    return [Row("port", "wrong", f"{port} is taken", cure, first)]
