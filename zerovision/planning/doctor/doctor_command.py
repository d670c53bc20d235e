"""The doctor's command line: its flags, what they ask for, and the exit code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerovision.launch.hosts import Command, host_names, read_hostfile, split_hosts, srun_command, ssh_command
from zerovision.training.base.errors import UserError
from zerovision.training.base.places import log_folder
from zerovision.training.base.settings import MOST_GPUS_PER_NODE, MOST_NODES
from zerovision.training.config import TrainConfig
from zerovision.training.config.command_line import OneLineParser, parse_args
from zerovision.training.data import DATASETS, data_options, find_dataset
from zerovision.training.data.settings import DATA_ROOT

if TYPE_CHECKING:
    from zerovision.planning.doctor.examination import Request

SOMETHING_WRONG_EXIT_CODE = 1
# Flags of the training that the doctor has too; the training's parser checks their values.
TRAINING_FLAGS = {
    "--data": "examine whether this data set is there, and the same on all machines",
    "--log-dir": "folder of all logs (default: logs/ beside scripts/)",
}


def parse(arguments: list[str], description: str | None) -> argparse.Namespace:
    """Parse the command line; `training_arguments` are those after `--`, then the doctor's own `TRAINING_FLAGS`.

    Raises:
        UserError: for a mistake.
        SystemExit: after `--help`.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    datasets = "; ".join(f"{entry.usage}: {entry.summary}" for entry in DATASETS.values()).replace("%", "%%")
    parser = OneLineParser("doctor", description)
    only = f"only decode every image of a data set and count its classes ({datasets})"
    parser.add_argument("--check-data", metavar="DATA", help=only)
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--hostfile", type=Path, help="examine these machines: lines of 'name slots=N'")
    hosts.add_argument("--hosts", metavar="A,B", help="examine these machines")
    hosts.add_argument("--here", action="store_true", help="examine this machine alone, also inside a Slurm job")
    parser.add_number("--nodes", 1, MOST_NODES, metavar="N", help="machines to take, from the top (default: all)")
    parser.add_number("--gpus-per-node", 1, MOST_GPUS_PER_NODE, metavar="G", help="GPUs (or CPU ranks) to take on each")
    for flag, meaning in TRAINING_FLAGS.items():
        parser.add_argument(flag, help=meaning)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse(arguments[:end])
    own = {flag: getattr(given, flag[2:].replace("-", "_")) for flag in TRAINING_FLAGS}
    given.has_training = end + 1 < len(arguments)
    given.training_arguments = arguments[end + 1 :]
    given.training_arguments += [f"{flag}={value}" for flag, value in own.items() if value is not None]
    return given


def run(given: argparse.Namespace) -> int:
    """Run the check that the command line asks for and return the exit code.

    Raises:
        UserError: for a mistake in the arguments.
    """
    # Imports come late: without the packages, or for --help, none is needed.
    if given.probe:
        from zerovision.planning.doctor.probe import serve

        serve(reached_by=" ".join(os.environ.get("SSH_CONNECTION", "").split()[2:3]))
        return 0
    if given.check_data is not None:
        return _check_data(given)
    from zerovision.planning.doctor.examination import examine
    from zerovision.planning.doctor.table import print_rows

    start = time.monotonic()
    rows = examine(request_of(given))
    seconds = time.monotonic() - start
    if given.json:
        content = {"rows": [dataclasses.asdict(row) for row in rows], "seconds": round(seconds, 1)}
        print(json.dumps(content, indent=1))
    else:
        print_rows(rows, seconds)
    return SOMETHING_WRONG_EXIT_CODE if any(row.verdict == "wrong" for row in rows) else 0


def _check_data(given: argparse.Namespace) -> int:
    from zerovision.planning.data_check import check_data, print_report

    config, _ = parse_args([*given.training_arguments, f"--data={given.check_data}"])
    report = check_data(data_options(config))
    print_report(given.check_data, report)
    return SOMETHING_WRONG_EXIT_CODE if report.unreadable else 0


def request_of(given: argparse.Namespace) -> Request:
    """Return what is to be examined.

    Raises:
        UserError: for a mistake in the training's arguments or the names of the machines.
    """
    from zerovision.planning.doctor.examination import HERE, Request
    from zerovision.planning.doctor.probe import local_command

    config, _ = parse_args(given.training_arguments)
    node_list = "" if given.here else os.environ.get("SLURM_JOB_NODELIST", "")
    slots: Mapping[str, int] = {HERE: 0}
    command: Callable[[str, list[str]], Command] = local_command
    if given.hostfile:
        slots, command = read_hostfile(given.hostfile, given.nodes or 1, given.gpus_per_node or 1), ssh_command
    elif given.hosts:
        slots, command = dict.fromkeys(split_hosts(given.hosts, given.nodes or 1), 0), ssh_command
    elif node_list:
        try:
            slots, command = dict.fromkeys(host_names(node_list), 0), srun_command
        except UserError as error:
            raise UserError(f"{error} Name the machines with --hosts.") from None
    elif given.nodes and given.nodes > 1:
        raise UserError(f"--nodes {given.nodes}: name the machines with --hostfile or --hosts.")
    return Request(
        slots={host: given.gpus_per_node or promised for host, promised in list(slots.items())[: given.nodes]},
        command=command,
        log_dir=str(Path(config.log_dir).expanduser().absolute() if config.log_dir else log_folder()),
        data=data_fields(config) if given.has_training or given.data is not None else None,
        training=config if given.has_training else None,
    )


def data_fields(config: TrainConfig) -> dict[str, Any]:
    """Return the fields of the data set's `DataOptions`, with an absolute path: probes run in another folder."""
    options, folder = dataclasses.asdict(data_options(config)), Path(os.path.expanduser(config.data))
    if not find_dataset(config.data).is_path or not (os.path.exists(folder) or "/" in config.data):
        return options
    root = config.data_root if config.data_root == DATA_ROOT else os.path.abspath(os.path.expanduser(config.data_root))
    return options | {"data": str(folder.absolute()), "data_root": root}
