"""The whole examination: reach the machines, ask them, and judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from planning.doctor import hosts, machine
from planning.doctor.data import judge_data
from planning.doctor.links import judge_network, judge_step
from planning.doctor.machine import Need
from planning.doctor.reach import Probe, Unreachable, ask_all, here
from planning.doctor.rows import Row, join_hosts, some_of
from training.config import REPO_ROOT, TrainConfig
from training.data import DataOptions
from training.strategies import STRATEGIES

FACTS_SECONDS, DATA_SECONDS, JOIN_SECONDS, NETWORK_SECONDS = 20.0, 60.0, 8.0, 20.0
CLASSES_WITHOUT_DATA, IMAGE_SIZE_WITHOUT_DATA = 1000, 224
HERE = "here"

Answer = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What is to be examined.

    Attributes:
        slots: ranks by host, in their order; 0 takes all GPUs of a host, or one CPU rank. `HERE` stands for this
            machine, alone.
        command: from a host to the command that starts the probe there.
        config: of the training.
        with_data: whether to look at `config.data`.
        with_model: whether to look at `config.model_type`.
        port: where the ranks are to meet.
    """

    slots: Mapping[str, int]
    command: Callable[[str], list[str]]
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


@dataclass
class Findings:
    """What the machines told, by host; a host that did not answer is missing."""

    here: Answer = field(default_factory=dict)
    facts: dict[str, Answer] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)
    fingerprints: dict[str, Answer] = field(default_factory=dict)
    network: dict[str, Answer] = field(default_factory=dict)
    data: Answer = field(default_factory=dict)
    model: Answer = field(default_factory=dict)
    lost: dict[str, Unreachable] = field(default_factory=dict)


def examine(request: Request) -> list[Row]:
    """Examine this machine, the hosts, the data and the network; return the rows of the table."""
    found = Findings()
    with ExitStack() as stack:
        probes = {host: stack.enter_context(Probe(host, request.command(host))) for host in request.slots}
        if not request.is_alone:
            probes[HERE] = stack.enter_context(Probe(HERE, here(HERE)))
        answers, found.lost = ask_all(list(probes.values()), lambda probe: _ask_machine(probe, request))
        for host in (host for host in request.slots if host in answers):
            answer = answers[host]
            found.facts[host], found.clocks[host] = answer["facts"], answer["offset"]
            if "data" in answer:
                found.fingerprints[host] = answer["data"]
        found.here = answers[HERE]["facts"] if HERE in answers else {}
        _ask_first_machine(request, found)
        _ask_network(request, found, probes)
    return join_hosts(_judge(request, found))


def _ask_machine(probe: Probe, request: Request) -> Answer:
    log_dir = str(Path(request.config.log_dir).expanduser().absolute()) if request.config.log_dir else ""
    names = [host for host in request.slots if host != HERE]
    answer: Answer = {"offset": probe.clock_offset()}
    answer["facts"] = probe.ask(
        "facts", FACTS_SECONDS, log_dir=log_dir or str(REPO_ROOT / "logs"), port=request.port, hosts=names
    )
    if "problem" in answer["facts"]:
        raise Unreachable(f"the probe fails: {answer['facts']['problem']}", "bring the code there to the same commit")
    if request.with_data and probe.host != HERE:
        answer["data"] = probe.ask("data_fingerprint", FACTS_SECONDS, options=request.data_options)
    return answer


def _ask_first_machine(request: Request, found: Findings) -> None:
    """Look at data and model on the first machine that answers, in a process of its own, which may use its GPU."""
    able = _able(found)
    if not able or not (request.with_data or request.with_model):
        return
    config = request.config
    try:
        with Probe(able[0], request.command(able[0])) as probe:
            if request.with_data:
                found.data = probe.ask("data", DATA_SECONDS, options=request.data_options)
            if request.with_model:
                found.model = probe.ask(
                    "model",
                    DATA_SECONDS,
                    model_type=config.model_type,
                    members=config.ensemble_members.split(","),
                    num_classes=found.data.get("classes", CLASSES_WITHOUT_DATA),
                    image_size=found.data.get("image_size", config.image_size or IMAGE_SIZE_WITHOUT_DATA),
                    batch_size=config.batch_size,
                )
    except Unreachable as error:
        found.data.setdefault("problem", str(error))


def _ask_network(request: Request, found: Findings, probes: Mapping[str, Probe]) -> None:
    """Let all machines that can run one rank for each of the training, and measure."""
    able = _able(found)
    if not able:
        return
    use_gpu = all(found.facts[host]["gpus"] and found.facts[host]["torch_cuda"] for host in able)
    ranks = {host: _ranks(request.slots[host], found.facts[host], use_gpu) for host in able}
    if sum(ranks.values()) < 2:
        return
    first = found.facts[able[0]]
    placed = list(ranks.items())
    starts = {host: sum(count for _, count in placed[:number]) for number, (host, _) in enumerate(placed)}

    def ask(probe: Probe) -> Answer:
        return probe.ask(
            "network",
            NETWORK_SECONDS + JOIN_SECONDS,
            first_rank=starts[probe.host],
            ranks=ranks[probe.host],
            hosts=placed,
            port=request.port if first["port_free"] else first["spare_port"],
            use_gpu=use_gpu,
            join_seconds=JOIN_SECONDS,
            seconds=NETWORK_SECONDS,
        )

    found.network, lost = ask_all([probes[host] for host in able], ask)
    for host, error in lost.items():
        found.network[host] = {"problem": str(error), "phase": "meet"}


def _able(found: Findings) -> list[str]:
    """Return the machines on which torch loads."""
    return [host for host, facts in found.facts.items() if not facts["import_problem"]]


def _ranks(slots: int, facts: Answer, use_gpu: bool) -> int:
    return min(slots or len(facts["gpus"]), len(facts["gpus"])) if use_gpu else slots or 1


def _judge(request: Request, found: Findings) -> list[Row]:
    rows = [] if request.is_alone else _judge_hosts(request, found)
    rows += _judge_machines(request, found)
    first = next(iter(_able(found)), "")
    if found.data:
        rows += judge_data(request.config.data, first, found.data, found.model, request.slots.get(first, 0))
    if "problem" in found.model:
        rows.append(Row("model", "wrong", found.model["problem"], "correct --model-type"))
    if found.network:
        rows += judge_network(found.network)
        reports = [answer["report"] for answer in found.network.values() if "report" in answer]
        # CPU ranks of one machine share memory and send nothing (training.rank_buffers).
        if reports and "parameters" in found.model and (len(request.slots) > 1 or reports[0]["backend"] != "gloo"):
            stage = STRATEGIES[request.config.strategy].zero_stage
            name = f"{request.config.model_type}, {request.config.strategy}"
            rows.append(judge_step(reports[0], name, found.model["parameters"], stage))
    return rows


def _judge_hosts(request: Request, found: Findings) -> list[Row]:
    """Judge what must be the same on all machines."""
    rows = [Row("hosts", "wrong", str(error), error.cure, host) for host, error in found.lost.items()]
    rows = rows or [Row("hosts", "ok", f"{some_of(list(request.slots))} answer without a password")]
    rows += hosts.judge_names(found.facts)
    if found.here:
        rows += hosts.judge_versions(found.facts, found.here)
        rows += hosts.judge_code(found.facts, found.here)
    if found.fingerprints:
        usable = {host: answer for host, answer in found.fingerprints.items() if "hash" in answer}
        unusable = {host: answer["problem"] for host, answer in found.fingerprints.items() if "problem" in answer}
        rows += hosts.judge_fingerprints(usable, unusable)
    return rows + hosts.judge_clocks(found.clocks)


def _judge_machines(request: Request, found: Findings) -> list[Row]:
    """Judge each machine for itself."""
    pins = machine.read_pins((REPO_ROOT / "requirements.txt").read_text())
    use_gpu = any(facts["gpus"] for facts in found.facts.values())
    rows, all_ranks = [], sum(request.slots.values())
    if found.here:
        rows.append(_of(HERE if not request.is_alone else "", machine.judge_packages(found.here, Need(), pins)))
    for host, facts in found.facts.items():
        need = Need(
            ranks=request.slots[host],
            all_ranks=all_ranks,
            parameters=found.model.get("parameters"),
            keep_last=request.config.keep_last,
            cluster_has_gpus=use_gpu,
        )
        if not request.is_alone and (row := machine.judge_packages(facts, need, pins)).verdict == "wrong":
            rows.append(_of(host, row))
        rows += [_of(host, row) for check in machine.CHECKS if (row := check(facts, need))]
    # The same check of all hosts side by side.
    order = list(dict.fromkeys(row.check for row in rows))
    rows.sort(key=lambda row: order.index(row.check))
    rows.append(machine.judge_locks(facts["locks"] for facts in [found.here, *found.facts.values()] if facts))
    return rows + hosts.judge_port(found.facts, request.port)


def _of(host: str, row: Row) -> Row:
    return Row(row.check, row.verdict, row.found, row.cure, "" if host == HERE and row.verdict == "ok" else host)
