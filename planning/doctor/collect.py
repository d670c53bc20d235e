"""Collects the findings: starts a probe on every machine and asks all of them at once."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from launch.cluster.agreement import reachable_addresses
from launch.cluster.remote_shell import Command
from planning.doctor.probe import PROBE, Probe, Unreachable, ask_all, local_command
from planning.doctor.tcp_paths import FailedPath, targets_of
from training.config import REPO_ROOT, TrainConfig
from training.data import DataOptions
from training.parallel.network_interfaces import interface_of

# Time limits of the answers on an idle machine; see `Probe.patience`.
FACTS_SECONDS, DATA_SECONDS, JOIN_SECONDS, NETWORK_SECONDS, PATHS_SECONDS = 25.0, 60.0, 12.0, 25.0, 20.0
SEEN_SECONDS = 5.0  # within which a shared disk shows what another machine has written
CLASSES_WITHOUT_DATA, IMAGE_SIZE_WITHOUT_DATA = 1000, 224
HERE = "here"

Answer = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What is to be examined.

    Attributes:
        slots: ranks by host, in their order; 0 for all GPUs of a host, or one CPU rank. `HERE` is this machine, alone.
        command: returns the command that runs a program on a host.
        config: of the training.
        with_dataset: whether to examine `config.data`.
        with_model: whether to examine `config.model_type`.
        port: where the ranks are to meet; 0 for any that is free.
    """

    slots: Mapping[str, int]
    command: Callable[[str, list[str]], Command]
    config: TrainConfig
    with_dataset: bool
    with_model: bool
    port: int

    @property
    def is_alone(self) -> bool:
        """Whether this machine alone is to train."""
        return list(self.slots) == [HERE]

    @property
    def log_dir(self) -> str:
        """The absolute path of the folder of all logs."""
        given = self.config.log_dir
        return str(Path(given).expanduser().absolute() if given else REPO_ROOT / "logs")


def dataset_options(config: TrainConfig) -> Answer:
    """Return the fields of `DataOptions` that a configuration has, with an absolute path: probes run elsewhere."""
    options = {field.name: getattr(config, field.name) for field in fields(DataOptions) if hasattr(config, field.name)}
    folder = Path(os.path.expanduser(config.data))
    return options | ({"data": str(folder.absolute())} if os.path.isdir(folder) or "/" in config.data else {})


@dataclass
class Findings:
    """The answers of the machines, by host in the order of the request; a host that did not answer is missing.

    Attributes:
        here: facts of this machine, see `host_facts.collect_host_facts`.
        hosts: the same of the hosts that were asked for.
        clock_offsets: seconds ahead of this machine's clock.
        fingerprints: see `workload.dataset_fingerprint`.
        log_writer: the host that has written a file into the log folder, '' for none.
        sees_log: whether the others see that file.
        network: see `network.measure_network`.
        failed_paths: between the hosts; searched for if the network's check failed.
        interfaces: by which the ranks of a host reach the others.
        dataset: see `workload.measure_dataset`, and `host`, the first machine, where it was measured.
        model: see `workload.measure_model`; measured on the first machine.
        lost: why a host did not answer.
    """

    here: Answer = field(default_factory=dict)
    hosts: dict[str, Answer] = field(default_factory=dict)
    clock_offsets: dict[str, float] = field(default_factory=dict)
    fingerprints: dict[str, Answer] = field(default_factory=dict)
    log_writer: str = ""
    sees_log: dict[str, bool] = field(default_factory=dict)
    network: dict[str, Answer] = field(default_factory=dict)
    failed_paths: list[FailedPath] = field(default_factory=list)
    interfaces: dict[str, str] = field(default_factory=dict)
    dataset: Answer = field(default_factory=dict)
    model: Answer = field(default_factory=dict)
    lost: dict[str, Unreachable] = field(default_factory=dict)

    @property
    def able(self) -> list[str]:
        """The hosts on which torch loads."""
        return [host for host, facts in self.hosts.items() if not facts["import_problem"]]

    @property
    def all_reduce(self) -> Answer | None:
        """What all-reduces of a small and a large vector took; None if none was measured."""
        reports = [answer["report"] for answer in self.network.values() if "report" in answer]
        if not reports or any("problem" in answer for answer in self.network.values()):
            return None
        kept = ("ranks", "backend", "small", "large")
        return {key: reports[0][key] for key in kept} | {"machines": len(self.network)}


def collect(request: Request) -> Findings:
    """Ask this machine and all hosts, then let the hosts measure the network between them."""
    found = Findings()
    with ExitStack() as stack:
        probes = {host: stack.enter_context(Probe(host, request.command(host, PROBE))) for host in request.slots}
        if not request.is_alone:
            probes[HERE] = stack.enter_context(Probe(HERE, local_command(HERE, PROBE)))
        first = next(iter(request.slots))
        with ThreadPoolExecutor(1) as pool:
            workload = pool.submit(_ask_workload, first, request)
            answers, found.lost = ask_all(list(probes.values()), lambda probe: _ask_host(probe, request))
            found.dataset, found.model = workload.result()
        found.here = answers.get(HERE, {}).get("facts", {})
        for host in (host for host in request.slots if host in answers):
            _add_host(found, host, answers[host])
        if first in found.lost:
            found.dataset, found.model = _ask_workload(found.able[0], request) if found.able else ({}, {})
        _ask_log_folder(request, found, probes)
        _ask_network(request, found, probes)
    return found


def _ask_host(probe: Probe, request: Request) -> Answer:
    """Ask one machine what is asked of each."""
    is_examined = probe.host in request.slots
    answer: Answer = {"offset": probe.clock_offset()}
    answer["facts"] = probe.ask(
        "host_facts",
        FACTS_SECONDS,
        log_dir=request.log_dir,
        port=request.port,
        hosts=[host for host in request.slots if host != HERE],
        with_torch=is_examined,
    )
    if "problem" in answer["facts"]:
        raise Unreachable(f"the probe fails: {answer['facts']['problem']}", "bring the code there to the same commit")
    if request.with_dataset and is_examined and not request.is_alone:
        options = dataset_options(request.config)
        answer["fingerprint"] = probe.ask("dataset_fingerprint", FACTS_SECONDS, options=options)
    return answer


def _add_host(found: Findings, host: str, answer: Answer) -> None:
    """Add a host's answers, unless its doctor is older than ours and its facts are incomplete."""
    if not found.here.keys() <= answer["facts"].keys():
        found.lost[host] = Unreachable("the doctor there is another version", "bring its code to the same commit")
        return
    found.hosts[host], found.clock_offsets[host] = answer["facts"], answer["offset"]
    if "fingerprint" in answer:
        found.fingerprints[host] = answer["fingerprint"]


def _ask_workload(host: str, request: Request) -> tuple[Answer, Answer]:
    """Measure data set and model on one machine, in a process of its own, which may use its GPU."""
    config, dataset, model = request.config, {}, {}
    if not (request.with_dataset or request.with_model):
        return {}, {}
    try:
        with Probe(host, request.command(host, PROBE)) as probe:
            if request.with_dataset:
                dataset = probe.ask("dataset", DATA_SECONDS, options=dataset_options(config)) | {"host": host}
            if request.with_model:
                model = probe.ask(
                    "model",
                    DATA_SECONDS,
                    model_type=config.model_type,
                    members=config.ensemble_members.split(","),
                    num_classes=dataset.get("classes", CLASSES_WITHOUT_DATA),
                    image_size=dataset.get("image_size", config.image_size or IMAGE_SIZE_WITHOUT_DATA),
                    batch_size=config.micro_batch,
                    image_channels=dataset.get("image_channels", config.image_channels or 3),
                )
    except Unreachable as error:
        if request.with_dataset and not dataset:
            dataset = {"late": str(error), "host": host}
    return dataset, model


def _ask_log_folder(request: Request, found: Findings, probes: Mapping[str, Probe]) -> None:
    """Let the first host write a file into the log folder and the others look for it, of those that can write."""
    writer, *others = [host for host, facts in found.hosts.items() if not facts["log_folder"]["problem"]] or [""]
    if not others:
        return
    try:
        mark = probes[writer].ask("leave_mark", FACTS_SECONDS, folder=request.log_dir).get("mark")
        if not mark:
            return
        answers, _ = ask_all(
            [probes[host] for host in others],
            lambda probe: probe.ask("sees_mark", FACTS_SECONDS, mark=mark, seconds=SEEN_SECONDS),
        )
        probes[writer].ask("remove_mark", FACTS_SECONDS, mark=mark)
    except Unreachable:
        return  # the rows of the network name the host that is gone
    found.log_writer = writer
    found.sees_log = {host: answer["is_seen"] for host, answer in answers.items() if "is_seen" in answer}


def _ask_network(request: Request, found: Findings, probes: Mapping[str, Probe]) -> None:
    """Let all hosts that can run as many ranks as the training has, and measure the network between them."""
    hosts = {host: found.hosts[host] for host in found.able}
    use_gpu = all(facts["gpus"] and facts["torch_cuda"] for facts in hosts.values())
    ranks = {host: _ranks(request.slots[host], facts, use_gpu) for host, facts in hosts.items()}
    if sum(ranks.values()) < 2:
        return
    addresses = _addresses(hosts, found.here.get("addresses", {}))
    found.interfaces = {host: interface_of(addresses[host], facts["own_addresses"]) for host, facts in hosts.items()}
    first, asked = found.able[0], [probes[host] for host in hosts]
    port = hosts[first]["port"] or hosts[first]["spare_port"]
    patience = max(probe.patience for probe in asked)  # all wait for the slowest
    for probe in asked:
        probe.patience = patience
    common = {
        "ranks": list(ranks.items()),
        "address": addresses[first],
        "port": port,
        "secret": secrets.token_hex(32),
        "use_gpu": use_gpu,
        "join_seconds": JOIN_SECONDS * patience,
    }

    def measure(probe: Probe) -> Answer:
        limits = {"seconds": NETWORK_SECONDS * patience, "interface": found.interfaces[probe.host]}
        return probe.ask("network", NETWORK_SECONDS + JOIN_SECONDS, host=probe.host, common=common, **limits)

    found.network, lost = ask_all(asked, measure)
    found.network |= {host: {"problem": str(error), "phase": "meet"} for host, error in lost.items()}
    if len(hosts) > 1 and any("problem" in answer for answer in found.network.values()):
        answering = {host: probes[host] for host in hosts if host not in lost}
        found.failed_paths = _failed_paths(answering, addresses, {first: port})


def _failed_paths(
    probes: Mapping[str, Probe], addresses: Mapping[str, str], meeting_port: Mapping[str, int]
) -> list[FailedPath]:
    """Let all hosts listen, then try to connect to each other, and return the paths that failed."""

    def open_ports(probe: Probe) -> Answer:
        port = meeting_port.get(probe.host, 0)
        return probe.ask("open_ports", PATHS_SECONDS, address=addresses[probe.host], port=port)

    def try_paths(probe: Probe) -> Answer:
        targets = [(host, addresses[host], ports[host]) for host in targets_of(probe.host, list(ports))]
        return probe.ask("try_paths", PATHS_SECONDS, source=probe.host, targets=targets)

    opened, _ = ask_all(list(probes.values()), open_ports)
    ports = {host: answer["ports"] for host, answer in opened.items() if "problem" not in answer}
    tried, _ = ask_all([probes[host] for host in ports], try_paths)
    return [FailedPath(*path) for answer in tried.values() for path in answer.get("failed", ())]


def _addresses(hosts: Mapping[str, Answer], looked_up: Mapping[str, str | None]) -> dict[str, str]:
    """Return the address by which the others reach each host: where ssh came in, or what its name means here."""
    known = [facts["reached_by"] or looked_up.get(host) or "" for host, facts in hosts.items()]
    own = [facts["own_addresses"] for facts in hosts.values()]
    return dict(zip(hosts, reachable_addresses(known, own), strict=True))


def _ranks(slots: int, facts: Answer, use_gpu: bool) -> int:
    """Return how many ranks a host has in the network's check: at most its GPUs, or its cores if no host has GPUs."""
    most = len(facts["gpus"]) if use_gpu else facts["cores"]
    return min(slots or (most if use_gpu else 1), most)
