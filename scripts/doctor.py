"""Says what is wrong before a run starts.

python scripts/doctor.py                                            # this machine
python scripts/doctor.py --data ~/photos --model-type vgg --strategy ddp
python scripts/doctor.py --hostfile hostfile.txt --gpus-per-node 8  # all of its machines, and the network between them
python scripts/doctor.py --hosts node01,node02 --json
python scripts/doctor.py --check-data ~/photos                      # every image of a data set

Inside a Slurm job it looks at the job's machines. Words after -- are the training's own (train_distributed.py --help).
Exit code: 0 nothing is wrong, 1 something is, 2 the arguments are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.command_line import OneLineParser, parse_args, run_script
from training.data import DATASETS, DataOptions
from training.errors import UserError

if TYPE_CHECKING:
    from planning.doctor.collect import Request

SOMETHING_WRONG_EXIT_CODE = 1
TRAINING_FLAGS = ("data", "model_type", "strategy", "batch_size", "log_dir", "data_root", "val_fraction")


def main() -> int:
    """Do what the command line says and return the exit code."""
    return run_script("doctor", parse, _check)


def _check(given: argparse.Namespace) -> int:
    """Run the check that the command line asks for."""
    if given.probe:
        from planning.doctor.probe import serve

        serve(reached_by=" ".join(os.environ.get("SSH_CONNECTION", "").split()[2:3]))
        return 0
    if given.check_data is not None:
        return _check_data(_data_options(given))
    return _examine(given, given.training_words)


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line: the doctor's flags, and after -- the training's arguments."""
    end = words.index("--") if "--" in words else len(words)
    given = _flags(words[:end])
    given.training_words = words[end + 1 :]
    return given


def _flags(words: list[str]) -> argparse.Namespace:
    names = "; ".join(f"{entry.usage}: {entry.summary}" for entry in DATASETS.values())
    parser = OneLineParser("doctor", __doc__)
    parser.add_argument(
        "--check-data",
        metavar="DATA",
        help=f"only decode every image of a data set and count its classes ({names.replace('%', '%%')})",
    )
    machines = parser.add_mutually_exclusive_group()
    machines.add_argument("--hostfile", type=Path, help="examine these machines: lines of 'name slots=N'")
    machines.add_argument("--hosts", metavar="A,B", help="examine these machines")
    machines.add_argument("--here", action="store_true", help="examine this machine alone, inside a Slurm job too")
    parser.add_number("--nodes", 1, 1024, metavar="N", help="machines to take, from the top (default: all)")
    parser.add_number("--gpus-per-node", 1, 1024, metavar="G", help="GPUs (or CPU ranks) to take on each")
    parser.add_number("--port", 0, 65535, default=0, help="where the ranks are to meet (default: any that is free)")
    parser.add_argument("--data", help="look at this data set too: as for training")
    parser.add_argument("--model-type", help="reckon with this model: as for training")
    parser.add_argument("--strategy", help="with --model-type: how its state is sharded (default: ddp)")
    parser.add_argument("--batch-size", help="with --model-type: images per GPU (default: 16)")
    parser.add_argument("--log-dir", help="folder of all logs (default: logs/ beside scripts/)")
    parser.add_value("--val-fraction", float, "a number", help="share of one folder held out (default: 0.2)")
    parser.add_argument("--data-root", help="where torchvision data sets are kept (default: ~/.cache/zerovision)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    return parser.parse(words)


def _examine(given: argparse.Namespace, training_words: list[str]) -> int:
    from planning.doctor.assess import judge
    from planning.doctor.collect import examine

    start = time.monotonic()
    request = _request(given, training_words)
    rows = judge(request, examine(request))
    seconds = time.monotonic() - start
    if given.json:
        print(json.dumps({"rows": [dataclasses.asdict(row) for row in rows], "seconds": round(seconds, 1)}, indent=1))
    else:
        from planning.doctor.tables import print_rows

        print_rows(rows, seconds)
    return SOMETHING_WRONG_EXIT_CODE if any(row.verdict == "wrong" for row in rows) else 0


def _request(given: argparse.Namespace, training_words: list[str]) -> Request:
    """Put together what is to be examined; flags of the doctor win over the training's words."""
    from planning.doctor.collect import HERE, Request
    from planning.doctor.connect import here, over_srun, over_ssh

    flags = {name: getattr(given, name) for name in TRAINING_FLAGS if getattr(given, name) is not None}
    words = [*training_words, *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())]
    config, _ = parse_args(words)
    job = "" if given.here else os.environ.get("SLURM_JOB_NODELIST", "")
    if given.hostfile or given.hosts:
        slots, command = _named_hosts(given), over_ssh
    elif job:
        slots, command = dict.fromkeys(_hosts_of_job(job), given.gpus_per_node or 0), over_srun
    else:
        if given.nodes and given.nodes > 1:
            raise UserError(f"--nodes {given.nodes}: name the machines with --hostfile or --hosts.")
        slots, command = {HERE: given.gpus_per_node or 0}, here
    return Request(
        slots=dict(list(slots.items())[: given.nodes]),
        command=command,
        config=config,
        with_data=bool(training_words) or "data" in flags,
        with_model=bool(training_words) or "model_type" in flags,
        port=given.port,
    )


def _named_hosts(given: argparse.Namespace) -> Mapping[str, int]:
    """Return ranks by host, of the hostfile or of --hosts."""
    from launch.hostfile import HOST_NAME, read_hostfile

    if given.hostfile:
        slots = read_hostfile(given.hostfile, given.nodes or 1, given.gpus_per_node or 1)
    else:
        names = given.hosts.split(",")
        bad = [name for name in names if not HOST_NAME.fullmatch(name) or names.count(name) > 1]
        if bad:
            raise UserError(f"--hosts: {bad[0]!r} is no host name, or stands twice: give names as in node01,node02.")
        if len(names) < (given.nodes or 1):
            raise UserError(f"--hosts: {given.nodes} nodes asked for, {len(names)} named.")
        slots = dict.fromkeys(names, 0)
    return {host: given.gpus_per_node or promised for host, promised in slots.items()}


def _hosts_of_job(node_list: str) -> list[str]:
    """Return the host names of a Slurm job."""
    from launch.slurm.scontrol import host_names

    try:
        return host_names(node_list)
    except UserError as error:
        raise UserError(f"{error} Name the machines with --hosts.") from None


def _data_options(given: argparse.Namespace) -> DataOptions:
    defaults = DataOptions()
    return DataOptions(
        data=given.check_data,
        val_fraction=defaults.val_fraction if given.val_fraction is None else given.val_fraction,
        data_root=given.data_root or defaults.data_root,
    )


def _check_data(options: DataOptions) -> int:
    # after the arguments are parsed: these load torch, and --help should not wait for that
    from planning.data_check import check_data
    from planning.doctor.tables import print_data_report

    report = check_data(options)
    print_data_report(options.data, report)
    return SOMETHING_WRONG_EXIT_CODE if report.unreadable else 0


if __name__ == "__main__":
    sys.exit(main())
