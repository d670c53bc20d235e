"""Finds problems before a run starts: queries an agent on each machine, and prints a table."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerovision.launch.assess import (
    Row,
    Verdict,
    assess_all_reduce,
    assess_copies,
    assess_machine,
    assess_paths,
    assess_versions,
    join_hosts,
    some_of,
)
from zerovision.launch.hosts import HERE, host_names, read_hostfile, split_hosts
from zerovision.launch.machine_facts import Facts
from zerovision.launch.nodes import AGENT, POLL_SECONDS, Nodes
from zerovision.launch.rendezvous import reachable_addresses, unshared
from zerovision.training.base.errors import UserError, printable
from zerovision.training.base.run_folder import REPO_ROOT, as_typed, log_folder
from zerovision.training.base.settings import MOST_GPUS_PER_NODE, MOST_NODES
from zerovision.training.base.units import format_duration, plural
from zerovision.training.config import TrainConfig
from zerovision.training.config.command_line import parse_args
from zerovision.training.config.command_settings import CommandSettings, number, switch, text, words_behind
from zerovision.training.config.values import changed_flags
from zerovision.training.data import DATASETS, data_options, find_dataset
from zerovision.training.data.settings import DATA_ROOT
from zerovision.training.observe.environment import software
from zerovision.training.world.machine import interface_of

SOMETHING_WRONG_EXIT_CODE = 1
DATA_HELP = "; ".join(f"{entry.usage}: {entry.summary}" for entry in DATASETS.values()).replace("%", "%%")
REACH_SECONDS = 60.0  # time limit for a connection
# Time limits for answers.
FACTS_SECONDS, JOIN_SECONDS, NETWORK_SECONDS, PATHS_SECONDS = 300.0, 30.0, 60.0, 60.0  # listing a data set is slow
COLOURS: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "wrong": "bold red"}
WIDTH_IN_FILES = 180  # characters: rows stay whole in a log file


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(CommandSettings):
    """Finds problems before a run starts.

    python scripts/doctor.py                                            # this machine
    python scripts/doctor.py --data ~/photos                            # this machine, and whether the data set loads
    python scripts/doctor.py --hostfile hostfile.txt --gpus-per-node 8  # the hostfile's machines and their network
    python scripts/doctor.py --hosts node01,node02 --json
    python scripts/doctor.py --check-data ~/photos                      # every image of a data set
    python scripts/doctor.py --check-data list.csv --label-column species

    The trainer's flags, such as --task and --label-column, also work here. Inside a Slurm job the doctor examines the
    job's machines. Exit code: 0 if there is no problem, 1 if there is one, 2 for a mistake in the arguments.
    """

    check_data: str | None = text(
        f"Only decode every image of a data set and count the images per class ({DATA_HELP}).", None, metavar="DATA"
    )
    hostfile: str = text("Check the machines listed in this file, one per line as 'name slots=N'.")
    hosts: str = text("Check these machines.", metavar="A,B")
    here: bool = switch("Check only this machine, even inside a Slurm job.")
    nodes: int = number(0, 1, MOST_NODES, "Number of machines to check, from the top of the list (default: all).")
    gpus_per_node: int = number(0, 1, MOST_GPUS_PER_NODE, "Number of GPUs (or CPU ranks) to check on each machine.")
    data: str | None = text("Check that this data set exists and is the same on all machines.", None)
    log_dir: str | None = text("Folder for all logs (default: logs/ in the checkout, or in the current folder).", None)
    json: bool = switch("Print the rows as JSON.")
    compile: bool = switch("Only compile the C part of the JPEG reader, which reduces the time per image by a fifth.")
    training_words: tuple[str, ...] = words_behind(takes_trainers=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(map(bool, (self.hostfile, self.hosts, self.here))) > 1:
            raise UserError("--hostfile, --hosts and --here each choose the machines: use only one of them.")

    def config(self) -> TrainConfig:
        """Return the training configuration, with the doctor's own flags applied."""
        own = {"--data": self.check_data or self.data, "--log-dir": self.log_dir}
        own_words = [f"{flag}={value}" for flag, value in own.items() if value is not None]
        return parse_args([*self.training_words, *own_words], self.parser().flags)[0]


@dataclass(frozen=True)
class Request:
    """What to examine.

    Attributes:
        slots: number of ranks on each host, in order; 0 means one rank per GPU, or one CPU rank on a host without GPUs.
        shell: how to reach the hosts: a key of `zerovision.launch.hosts.SHELLS`.
        config: training configuration, or the defaults.
        has_data: whether to examine the data set in `config`.
        has_training: whether `config` describes a training run rather than the defaults.
    """

    slots: Mapping[str, int]
    shell: str
    config: TrainConfig
    has_data: bool = False
    has_training: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether only this machine is examined."""
        return list(self.slots) == [HERE]

    @property
    def log_dir(self) -> str:
        """The absolute path of the folder that contains all logs."""
        return str(Path(self.config.log_dir).expanduser().absolute() if self.config.log_dir else log_folder())


def run(given: DoctorSettings) -> int:
    """Run the check that the command line requests; return the exit code.

    Raises:
        UserError: for a mistake in the arguments.
    """
    if given.compile:
        from zerovision.training.data.reading.native import compile_library  # imports torch

        print(f"compiled: {compile_library()}")
        return 0
    if given.check_data is None:
        request = request_of(given)
        with closing(Nodes(request.shell)) as nodes:
            return print_examination(request, nodes, as_json=given.json)
    from zerovision.planning.data_check import check_data, print_report  # imports torch

    report = check_data(data_options(given.config()))
    print_report(given.check_data, report)
    return SOMETHING_WRONG_EXIT_CODE if report.unreadable else 0


def print_examination(request: Request, nodes: Nodes, *, as_json: bool = False) -> int:
    """Examine the machines through their agents and print the rows; return the exit code."""
    start = time.monotonic()
    rows = [replace(row, cure=as_typed(row.cure)) for row in examine(request, nodes)]
    seconds = time.monotonic() - start
    if as_json:
        content = {"rows": [dataclasses.asdict(row) for row in rows], "seconds": round(seconds, 1)}
        print(json.dumps(content, indent=1))
    else:  # one line per row, then the number of rows with each verdict
        has_hosts = any(row.host for row in rows)
        table = Table("check", "", *(["host"] if has_hosts else []), "found", "fix", box=None, pad_edge=False)
        for row in rows:
            verdict = f"[{COLOURS[row.verdict]}]{row.verdict}[/]"
            cells = [*([row.host] if has_hosts else []), row.found, row.cure]
            table.add_row(row.check, verdict, *(escape(printable(text)) for text in cells))
        Console(highlight=False, width=shutil.get_terminal_size((WIDTH_IN_FILES, 0)).columns).print(table)
        counts = Counter(row.verdict for row in rows)
        end = f"{counts['wrong']} wrong, {plural(counts['warning'], 'warning')}, {counts['ok']} ok"
        print(f"{end}; {format_duration(round(seconds))}")
    return SOMETHING_WRONG_EXIT_CODE if any(row.verdict == "wrong" for row in rows) else 0


def request_of(given: DoctorSettings) -> Request:
    """Return what to examine; raise a UserError for a mistake in the training flags or in the names of the machines."""
    node_list = "" if given.here else os.environ.get("SLURM_JOB_NODELIST", "")
    slots, shell = {HERE: 0}, "local"
    if given.hostfile:
        slots, shell = read_hostfile(Path(given.hostfile), given.nodes or 1, given.gpus_per_node or 1), "ssh"
    elif given.hosts:
        slots, shell = dict.fromkeys(split_hosts(given.hosts, given.nodes or 1), 0), "ssh"
    elif node_list:
        try:
            slots, shell = dict.fromkeys(host_names(node_list), 0), "srun"
        except UserError as error:
            raise UserError(f"{error} Name the machines with --hosts.") from None
    elif given.nodes > 1:
        raise UserError(f"--nodes {given.nodes}: name the machines with --hostfile or --hosts.")
    slots = {host: given.gpus_per_node or promised for host, promised in [*slots.items()][: given.nodes or None]}
    has_training = bool(given.training_words)
    return Request(slots, shell, given.config(), has_training or given.data is not None, has_training)


def data_fields(config: TrainConfig) -> dict[str, Any]:
    """Return the fields of the data set's `DataOptions`, with absolute paths, because agents run in another folder."""
    options, folder = dataclasses.asdict(data_options(config)), Path(os.path.expanduser(config.data))
    if not find_dataset(config.data).is_path or not (os.path.exists(folder) or "/" in config.data):
        return options
    root = config.data_root if config.data_root == DATA_ROOT else os.path.abspath(os.path.expanduser(config.data_root))
    return options | {"data": str(folder.absolute()), "data_root": root}


def examine(request: Request, nodes: Nodes) -> list[Row]:
    """Return all rows, merging equal rows of several hosts; an agent is started on each host that has none."""
    hosts, rows = _facts(nodes, request)
    if hosts and not request.is_alone:
        rows = rows or [Row("hosts", "ok", f"{some_of(list(hosts))} answer")]
        rows += assess_versions(hosts, software()) + assess_copies(hosts)
        rows += _examine_shared_logs(nodes, request.log_dir, hosts)
    has_gpus, all_ranks = any(facts["gpus"] for facts in hosts.values()), sum(request.slots.values())
    saved_bytes = max((facts["data"].get("saved_bytes", 0) for facts in hosts.values()), default=0)
    for host, facts in hosts.items():
        slots = request.slots[host]
        found = assess_machine(facts, slots, all_ranks, cluster_has_gpus=has_gpus, saved_bytes=saved_bytes)
        rows += [replace(row, host=host) for row in found]
    rows += _examine_network(nodes, request, hosts)
    if request.is_alone:
        rows = [replace(row, host="") for row in rows]
    return join_hosts(rows)


def _facts(nodes: Nodes, request: Request) -> tuple[dict[str, Facts], list[Row]]:
    """Return facts about the hosts that answer, and rows for the other hosts."""
    nodes.connect([host for host in request.slots if host not in nodes.shell_of])
    deadline = time.monotonic() + REACH_SECONDS
    while time.monotonic() < deadline and any(
        host not in nodes.found and not nodes.shell_of[host].failure() for host in request.slots
    ):
        nodes.beat()
        time.sleep(POLL_SECONDS)
    config = request.config
    flags = [f"--model-type={config.model_type}", *changed_flags(config, TrainConfig())]
    order: dict[str, Any] = {"log_dir": request.log_dir, "data": data_fields(config) if request.has_data else None}
    order["training"] = flags if request.has_training else None
    answers = nodes.ask(list(nodes.found), "facts", FACTS_SECONDS, **order)
    hosts, rows = {}, []
    for host in request.slots:
        answer, shell = answers.get(host, {}), nodes.shell_of[host]
        if answer and "problem" not in answer:
            hosts[host] = answer
            continue
        if answer:
            why = f"the examination failed: {answer['problem']}", "check out the same commit there"
        elif shell.failure():
            why = explain(host, shell.process.returncode, "\n".join(shell.lines))
        else:
            seconds = FACTS_SECONDS if host in nodes.found else REACH_SECONDS
            why = f"no answer within {seconds:.0f} s", f"log in to {host} and check what hangs"
        rows.append(Row("hosts", "wrong", *why, host))
    return hosts, rows


def _examine_shared_logs(nodes: Nodes, log_dir: str, hosts: Mapping[str, Facts]) -> list[Row]:
    """Have the first host write a file into the log folder, and the other hosts look for it."""
    writing = [host for host, facts in hosts.items() if not facts["log_folder"]["problem"]]
    if len(writing) < 2:
        return []
    found = unshared(nodes, writing, log_dir)
    if len(writing) == len(found) == 2:  # either host may be at fault
        del found[writing[0]]
    cure = "use a --log-dir on a disk that all hosts share, or mount it there"
    rows = [Row("shared logs", "wrong", reason, cure, host) for host, reason in found.items()]
    return rows or [Row("shared logs", "ok", f"what {writing[0]} writes in the log folder appears on every host")]


def _examine_network(nodes: Nodes, request: Request, hosts: Mapping[str, Facts]) -> list[Row]:
    """Have the hosts that can import torch connect to each other, then measure an all-reduce across all ranks."""
    hosts = {host: facts for host, facts in hosts.items() if not facts["import_problem"]}
    use_gpu = all(facts["gpus"] and facts["torch_cuda"] for facts in hosts.values())
    ranks = {}
    for host, facts in hosts.items():  # at most one rank per GPU, or per core if any host has no GPU
        most = len(facts["gpus"]) if use_gpu else facts["cores"]
        ranks[host] = min(request.slots[host] or (most if use_gpu else 1), most)
    if sum(ranks.values()) < 2:
        return []
    known = [facts["address"] or _address_of(host) for host, facts in hosts.items()]
    own = {host: facts["own_addresses"] for host, facts in hosts.items()}
    addresses = dict(zip(hosts, reachable_addresses(known, list(own.values())), strict=True))
    if len(hosts) > 1 and (rows := assess_paths(_failed_paths(nodes, addresses))):
        return rows
    interfaces = {host: interface_of(addresses[host], own[host]) for host in hosts}
    first = next(iter(hosts))
    answers = nodes.ask(
        list(hosts),
        "all-reduce",
        NETWORK_SECONDS + JOIN_SECONDS,
        ranks=list(ranks.items()),
        address=addresses[first],
        port=hosts[first]["spare_port"],
        run_id=secrets.token_hex(8),
        use_gpu=use_gpu,
        interfaces=interfaces,
        join_seconds=JOIN_SECONDS,
        seconds=NETWORK_SECONDS,
    )
    answers |= {host: {"problem": "no answer"} for host in hosts if host not in answers}
    way = f"over {', '.join(sorted({*interfaces.values()} - {''})) or 'an unknown interface'}"
    return [assess_all_reduce(answers, sum(ranks.values()), way if len(hosts) > 1 else "within one machine")]


def _address_of(host: str) -> str:
    """Return the IPv4 or IPv6 address of a name, or '' if this machine cannot resolve it."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _failed_paths(nodes: Nodes, addresses: Mapping[str, str]) -> list[Sequence[Any]]:
    """Have each host connect to the first host and to the next host in a ring; return the paths that failed."""
    opened = nodes.ask(list(addresses), "listen", PATHS_SECONDS, addresses=addresses)
    ports = {host: answer["port"] for host, answer in opened.items() if "port" in answer}
    hosts = list(ports)
    following = dict(zip(hosts, hosts[1:] + hosts[:1], strict=True))
    targets = {
        host: [(other, addresses[other], ports[other]) for other in sorted({hosts[0], following[host]} - {host})]
        for host in hosts
    }
    tried = nodes.ask(hosts, "reach", PATHS_SECONDS, targets=targets)
    return [path for answer in tried.values() for path in answer.get("failed", ())]


# Text on stderr (from OpenSSH's messages) -> finding and cure; the first match is used.
SSH_COMPLAINTS = {
    "IDENTIFICATION HAS CHANGED": ("its host key has changed", "if that is expected: ssh-keygen -R {host}"),
    "Host key verification failed": ("its host key is unknown to ssh", "ssh {host} once and accept the key"),
    "Could not resolve hostname": ("no such host name", "correct the name, or add it to the DNS or to /etc/hosts"),
    "Permission denied": ("ssh wants a password", "ssh-copy-id {host} (the key must be one that ssh uses by default)"),
    "Too many authentication failures": ("ssh offers too many keys", "name one key in ~/.ssh/config: IdentityFile"),
    "Connection refused": ("no ssh server answers (connection refused)", "start sshd on {host}, or correct its port"),
    "timed out": ("no answer (timed out): the host is down, or behind a firewall", "switch {host} on; open port 22"),
    "No route to host": ("no route to the host: it is down, or in another network", "switch {host} on"),
    "Network is unreachable": ("its network cannot be reached from here", "check the routes of this machine"),
    "can't open file": ("the repository is not at the same path there", "put {root} on {host}, or share its folder"),
    "closed by": ("ssh server closed the connection", "check the log of sshd on {host} (MaxStartups, AllowUsers)"),
    "reset by": ("the connection was reset", "check the log of sshd on {host} (MaxStartups, a firewall)"),
}
NOT_FOUND_CODES = (126, 127)  # from a shell: the command cannot be executed, or is not found


def explain(host: str, code: int, complaint: str) -> tuple[str, str]:
    """Return the reason that a host has no agent, and a fix, based on the exit code and stderr of its start."""
    for sign, (found, cure) in SSH_COMPLAINTS.items():
        if sign in complaint:
            return found, cure.format(host=host, root=REPO_ROOT)
    if code in NOT_FOUND_CODES:
        return f"{sys.executable} is not there", f"make setup in {REPO_ROOT} on {host}, or share the folder"
    last = (complaint.strip() or "nothing on stderr").splitlines()[-1].strip()
    return f"the agent ended with code {code}: {last[:200]}", f"try: ssh {host} {' '.join(AGENT)}"
