"""Answers the doctor's questions on one machine: one line of JSON each, over standard input and output.

`ask -> answer`, see `ANSWERS`. An answer begins with the record separator of RFC 7464, so that a greeting which a
remote shell prints first is not taken for one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.errors import UserError
from training.observe.shared_folder import leave_mark, sees_mark

RECORD_SEPARATOR = "\x1e"
LEAST_COMPUTING_SECONDS = 0.1  # starting Python and reading the modules; less is no measure


def _facts(**request: Any) -> dict[str, Any]:
    from planning.doctor.host_facts import collect_facts

    return collect_facts(**request)


def _data(**request: Any) -> dict[str, Any]:
    from planning.doctor.data import examine_data

    return examine_data(**request)


def _data_fingerprint(**request: Any) -> dict[str, Any]:
    from planning.doctor.data import cheap_fingerprint

    return cheap_fingerprint(**request)


def _model(**request: Any) -> dict[str, Any]:
    from planning.doctor.model import model_facts

    return model_facts(**request)


def _network(**request: Any) -> dict[str, Any]:
    from planning.doctor.network import measure_network

    return measure_network(**request)


def _open_ports(**request: Any) -> dict[str, Any]:
    from planning.doctor.paths import open_ports

    return open_ports(**request)


def _try_paths(**request: Any) -> dict[str, Any]:
    from planning.doctor.paths import try_paths

    return try_paths(**request)


def _leave_mark(folder: str) -> dict[str, Any]:
    return {"mark": str(leave_mark(Path(folder)))}


def _remove_mark(mark: str) -> dict[str, Any]:
    Path(mark).unlink(missing_ok=True)
    return {}


# The modules are imported when they are asked for: the first answer contains the time and must come at once.
ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "time": lambda: {"time": time.time(), "slowdown": slowdown()},
    "facts": _facts,
    "data": _data,
    "data_fingerprint": _data_fingerprint,
    "model": _model,
    "network": _network,
    "leave_mark": _leave_mark,
    "sees_mark": lambda mark, seconds: {"is_seen": sees_mark(Path(mark), seconds)},
    "remove_mark": _remove_mark,
    "open_ports": _open_ports,
    "try_paths": _try_paths,
}


def slowdown() -> float:
    """Return how many times longer than on an idle machine a process takes here, at least 1.

    That is the larger of the time this process has existed per second of its own computing, and of the average number
    of processes that wanted to compute in the last minute, per core. A question may change the former (this process
    waits for it), so the first answer counts.
    """
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    existed = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return max(1.0, existed / max(time.process_time(), LEAST_COMPUTING_SECONDS), load)


def serve(reached_by: str) -> None:
    """Answer each line of standard input until its end.

    Args:
        reached_by: this machine's address on the way from the doctor, '' where that is not known.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not stand among the answers
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"reached_by": reached_by, **ANSWERS[question["ask"]](**question["with"])}
        except UserError as error:
            answer = {"problem": str(error)}
        except Exception as error:
            answer = {"problem": f"{type(error).__name__}: {error}"}
        output.write(f"{RECORD_SEPARATOR}{json.dumps(answer)}\n")
        output.flush()
