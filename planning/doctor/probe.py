"""Answers the doctor's questions on one machine: one JSON object per line, on standard input and output.

Each answer begins with the record separator of RFC 7464, which distinguishes it from a greeting that a remote shell
prints first.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import time
from pathlib import Path
from typing import Any

from training.checkpoint.atomic_write import process_start_ticks
from training.errors import UserError
from training.observe.shared_folder import leave_mark, sees_mark

RECORD_SEPARATOR = "\x1e"
LEAST_COMPUTING_SECONDS = 0.1  # starting Python and importing the modules; less is no measure

# Question -> the function in planning.doctor that answers it. Modules are imported on demand: the first answer
# contains the time and must come at once.
ANSWERS = {
    "time": "probe:time_and_load",
    "host_facts": "host_facts:collect_host_facts",
    "dataset": "workload:measure_dataset",
    "dataset_fingerprint": "workload:dataset_fingerprint",
    "model": "workload:measure_model",
    "network": "network:measure_network",
    "open_ports": "tcp_paths:open_ports",
    "try_paths": "tcp_paths:try_paths",
    "leave_mark": "probe:write_mark",
    "sees_mark": "probe:look_for_mark",
    "remove_mark": "probe:remove_mark",
}


def time_and_load() -> dict[str, float]:
    """Return the machine's `time` and the `slowdown` of processes there."""
    return {"time": time.time(), "slowdown": slowdown()}


def write_mark(folder: str) -> dict[str, str]:
    """Write a file into a folder and return its path as `mark`, see `leave_mark`."""
    return {"mark": str(leave_mark(Path(folder)))}


def look_for_mark(mark: str, seconds: float) -> dict[str, bool]:
    """Return `is_seen`, see `sees_mark`."""
    return {"is_seen": sees_mark(Path(mark), seconds)}


def remove_mark(mark: str) -> dict[str, Any]:
    """Remove a mark."""
    Path(mark).unlink(missing_ok=True)
    return {}


def slowdown() -> float:
    """Return how many times longer than on an idle machine a process takes here, at least 1.

    That is the larger of the age of this process per second of its CPU time, and of the load average of the last
    minute per core. This process is idle while it waits for a question, so only the first answer is a measure.
    """
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(process_start_ticks("self")) / os.sysconf("SC_CLK_TCK")
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return max(1.0, age / max(time.process_time(), LEAST_COMPUTING_SECONDS), load)


def serve(reached_by: str) -> None:
    """Answer each line of standard input until its end.

    Args:
        reached_by: this machine's address on the way from the doctor, '' if unknown.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps what libraries print out of the answers
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = pkgutil.resolve_name(f"planning.doctor.{ANSWERS[question['ask']]}")(**question["with"])
            answer = {"reached_by": reached_by, **answer}
        except UserError as error:
            answer = {"problem": str(error)}
        except Exception as error:
            answer = {"problem": f"{type(error).__name__}: {error}"}
        output.write(f"{RECORD_SEPARATOR}{json.dumps(answer)}\n")
        output.flush()
