"""The whole examination: reach the machines, ask them all at once, and have what they say judged."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from planning.doctor.connect import Command, Probe, Unreachable, ask_all, here
from planning.doctor.paths import FailedPath, targets_of
from training.config import REPO_ROOT, TrainConfig
from training.data import DataOptions
from training.parallel.network_interfaces import address_towards, interface_of, is_loopback

# What an answer may take on an idle machine; see `Probe.patience`.
FACTS_SECONDS, DATA_SECONDS, JOIN_SECONDS, NETWORK_SECONDS, PATHS_SECONDS = 25.0, 60.0, 12.0, 25.0, 20.0
SEEN_SECONDS = 5.0  # within which a shared disk shows what another machine has written
CLASSES_WITHOUT_DATA, IMAGE_SIZE_WITHOUT_DATA = 1000, 224
HERE = "here"

Answer = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What is to be examined.

    Attributes:
        slots: ranks by host, in their order; 0 takes all GPUs of a host, or one CPU rank. `HERE` stands for this
            machine, alone.
        command: from a host to what starts the probe there.
        config: of the training.
        with_data: whether to look at `config.data`.
        with_model: whether to look at `config.model_type`.
        port: where the ranks are to meet; 0 for any that is free.
    """

    slots: Mapping[str, int]
    command: Callable[[str], Command]
    config: TrainConfig
    with_data: bool
    with_model: bool
    port: int

    @property
    def is_alone(self) -> bool:
        """Whether this machine alone is to train."""
        return list(self.slots) == [HERE]

    @property
    def data_options(self) -> Answer:
        """What the probes need to load the data set."""
        names = {option.name for option in fields(DataOptions)} & {option.name for option in fields(TrainConfig)}
        options = {name: getattr(self.config, name) for name in names}
        folder = Path(self.config.data).expanduser()
        # A probe starts in another folder than the user typed this in.
        return options | ({"data": str(folder.absolute())} if folder.is_dir() or "/" in self.config.data else {})

    @property
    def log_dir(self) -> str:
        """The folder of all logs."""
        given = self.config.log_dir
        return str(Path(given).expanduser().absolute() if given else REPO_ROOT / "logs")


@dataclass
class Findings:
    """What the machines told, by host in the order of the request; a host that did not answer is missing.

    Attributes:
        here: this machine's facts.
        facts: see `facts.collect_facts`.
        clocks: seconds ahead of this machine's.
        fingerprints: see `data.cheap_fingerprint`.
        writes_logs: the host that has written a file into the log folder, '' for none.
        sees_logs: whether that file is there, on the others.
        network: see `network.measure_network`.
        failed_paths: between the hosts; looked for if the network's check failed.
        interfaces: by which the ranks of a host talk to the others.
        data: see `data.examine_data`; on the first machine.
        model: see `model.model_facts`; on the first machine.
        lost: why a host did not answer.
    """

    here: Answer = field(default_factory=dict)
    facts: dict[str, Answer] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)
    fingerprints: dict[str, Answer] = field(default_factory=dict)
    writes_logs: str = ""
    sees_logs: dict[str, bool] = field(default_factory=dict)
    network: dict[str, Answer] = field(default_factory=dict)
    failed_paths: list[FailedPath] = field(default_factory=list)
    interfaces: dict[str, str] = field(default_factory=dict)
    data: Answer = field(default_factory=dict)
    model: Answer = field(default_factory=dict)
    lost: dict[str, Unreachable] = field(default_factory=dict)

    @property
    def able(self) -> list[str]:
        """The machines on which torch loads."""
        return [host for host, facts in self.facts.items() if not facts["import_problem"]]


def examine(request: Request) -> Findings:
    """Ask this machine, the hosts, the data and the network."""
    found = Findings()
    with ExitStack() as stack:
        probes = {host: stack.enter_context(Probe(host, request.command(host))) for host in request.slots}
        if not request.is_alone:
            probes[HERE] = stack.enter_context(Probe(HERE, here(HERE)))
        first = next(iter(request.slots))
        with ThreadPoolExecutor(1) as beside:
            data_and_model = beside.submit(_ask_one, first, request)
            answers, found.lost = ask_all(list(probes.values()), lambda probe: _ask_machine(probe, request))
            found.data, found.model = data_and_model.result()
        for host in (host for host in request.slots if host in answers):
            found.facts[host], found.clocks[host] = answers[host]["facts"], answers[host]["offset"]
            if "data" in answers[host]:
                found.fingerprints[host] = answers[host]["data"]
        found.here = answers[HERE]["facts"] if HERE in answers else {}
        _lose_others(found)
        if first in found.lost:
            found.data, found.model = _ask_one(found.able[0], request) if found.able else ({}, {})
        _ask_log_folder(request, found, probes)
        _ask_network(request, found, probes)
    return found


def _ask_machine(probe: Probe, request: Request) -> Answer:
    """Ask what every machine is asked."""
    is_examined = probe.host in request.slots
    answer: Answer = {"offset": probe.clock_offset()}
    answer["facts"] = probe.ask(
        "facts",
        FACTS_SECONDS,
        log_dir=request.log_dir,
        port=request.port,
        hosts=[host for host in request.slots if host != HERE],
        with_torch=is_examined,
    )
    if "problem" in answer["facts"]:
        raise Unreachable(f"the probe fails: {answer['facts']['problem']}", "bring the code there to the same commit")
    if request.with_data and is_examined and not request.is_alone:
        answer["data"] = probe.ask("data_fingerprint", FACTS_SECONDS, options=request.data_options)
    return answer


def _ask_one(host: str, request: Request) -> tuple[Answer, Answer]:
    """Look at data and model on one machine, in a process of its own, which may use its GPU."""
    config, data, model = request.config, {}, {}
    if not (request.with_data or request.with_model):
        return {}, {}
    try:
        with Probe(host, request.command(host)) as probe:
            if request.with_data:
                data = probe.ask("data", DATA_SECONDS, options=request.data_options) | {"host": host}
            if request.with_model:
                model = probe.ask(
                    "model",
                    DATA_SECONDS,
                    model_type=config.model_type,
                    members=config.ensemble_members.split(","),
                    num_classes=data.get("classes", CLASSES_WITHOUT_DATA),
                    image_size=data.get("image_size", config.image_size or IMAGE_SIZE_WITHOUT_DATA),
                    batch_size=config.batch_size,
                )
    except Unreachable as error:
        if request.with_data and not data:
            data = {"late": str(error), "host": host}
    return data, model


def _lose_others(found: Findings) -> None:
    """Put aside hosts whose doctor tells less than this one asks for: what it tells cannot be judged."""
    for host in [host for host, facts in found.facts.items() if not found.here.keys() <= facts.keys()]:
        found.lost[host] = Unreachable("the doctor there is another version", "bring its code to the same commit")
        del found.facts[host], found.clocks[host]
        found.fingerprints.pop(host, None)


def _ask_log_folder(request: Request, found: Findings, probes: Mapping[str, Probe]) -> None:
    """Let the first machine write a file into the log folder, and the others look for it, of those that can write."""
    first, *others = [host for host, facts in found.facts.items() if not facts["log_folder"]["problem"]] or [""]
    if not others:
        return
    try:
        mark = probes[first].ask("leave_mark", FACTS_SECONDS, folder=request.log_dir).get("mark")
        if not mark:
            return
        looking = [probes[host] for host in others]
        answers, _ = ask_all(
            looking, lambda probe: probe.ask("sees_mark", FACTS_SECONDS, mark=mark, seconds=SEEN_SECONDS)
        )
        probes[first].ask("remove_mark", FACTS_SECONDS, mark=mark)
    except Unreachable:
        return  # the first machine has gone: the network's rows name it
    found.writes_logs = first
    found.sees_logs = {host: answer["is_seen"] for host, answer in answers.items() if "is_seen" in answer}


def _ask_network(request: Request, found: Findings, probes: Mapping[str, Probe]) -> None:
    """Let all machines that can run one rank for each of the training, and measure."""
    able = found.able
    use_gpu = all(found.facts[host]["gpus"] and found.facts[host]["torch_cuda"] for host in able)
    ranks = {host: _ranks(request.slots[host], found.facts[host], use_gpu) for host in able}
    if sum(ranks.values()) < 2:
        return
    addresses = _addresses({host: found.facts[host] for host in able}, found.here.get("addresses", {}))
    found.interfaces = {
        host: interface_of(address, found.facts[host]["own_addresses"]) for host, address in addresses.items()
    }
    placed, first, secret = list(ranks.items()), found.facts[able[0]], secrets.token_hex(32)
    port = first["port"] or first["spare_port"]
    patience = max(probes[host].patience for host in able)  # all wait for the slowest
    for host in able:
        probes[host].patience = patience

    def ask(probe: Probe) -> Answer:
        number = able.index(probe.host)
        return probe.ask(
            "network",
            NETWORK_SECONDS + JOIN_SECONDS,
            first_rank=sum(count for _, count in placed[:number]),
            ranks=placed[number][1],
            hosts=placed,
            address=addresses[able[0]],
            port=port,
            secret=secret,
            interface=found.interfaces[probe.host],
            use_gpu=use_gpu,
            join_seconds=JOIN_SECONDS * patience,
            seconds=NETWORK_SECONDS * patience,
        )

    found.network, lost = ask_all([probes[host] for host in able], ask)
    found.network |= {host: {"problem": str(error), "phase": "meet"} for host, error in lost.items()}
    if len(able) > 1 and any("problem" in answer for answer in found.network.values()):
        answering = [probes[host] for host in able if host not in lost]
        found.failed_paths = _failed_paths(answering, addresses, {able[0]: port})


def _failed_paths(
    probes: Sequence[Probe], addresses: Mapping[str, str], meeting_port: Mapping[str, int]
) -> list[FailedPath]:
    """Let all machines listen, then try to reach each other, and return the paths between them that failed."""
    ports, _ = ask_all(
        probes,
        lambda probe: probe.ask(
            "open_ports", PATHS_SECONDS, address=addresses[probe.host], port=meeting_port.get(probe.host, 0)
        ),
    )
    hosts = [host for host, answer in ports.items() if "problem" not in answer]

    def try_paths(probe: Probe) -> Answer:
        targets = [(host, addresses[host], ports[host]["ports"]) for host in targets_of(probe.host, hosts)]
        return probe.ask("try_paths", PATHS_SECONDS, source=probe.host, targets=targets)

    answers, _ = ask_all([probe for probe in probes if probe.host in hosts], try_paths)
    return [FailedPath(*path) for answer in answers.values() for path in answer.get("failed", ())]


def _addresses(facts: Mapping[str, Answer], looked_up: Mapping[str, str | None]) -> dict[str, str]:
    """Return the address of every host by which the others reach it: where ssh came in, or what its name means here."""
    if len(facts) == 1:
        return dict.fromkeys(facts, "127.0.0.1")
    known = [answer["reached_by"] or looked_up.get(host) or "" for host, answer in facts.items()]
    return {
        host: address_towards(known, answer["own_addresses"]) if is_loopback(address) else address
        for (host, answer), address in zip(facts.items(), known, strict=True)
    }


def _ranks(slots: int, facts: Answer, use_gpu: bool) -> int:
    """Return how many ranks a machine has in the network's check: no more than it has GPUs, or cores where none has."""
    most = len(facts["gpus"]) if use_gpu else facts["cores"]
    return min(slots or (most if use_gpu else 1), most)
