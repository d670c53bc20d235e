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
from typing import Any

from training.errors import UserError

RECORD_SEPARATOR = "\x1e"


def _facts(**request: Any) -> dict[str, Any]:
    from planning.doctor.facts import collect_facts

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


# The modules are imported when they are asked for: the first answer tells the time and must come at once.
ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "time": lambda: {"time": time.time()},
    "facts": _facts,
    "data": _data,
    "data_fingerprint": _data_fingerprint,
    "model": _model,
    "network": _network,
}


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
