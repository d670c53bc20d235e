"""Decides whether a Slurm job is requeued after a start of it has ended."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from launch.node_run import FINAL_CODES
from training.base.atomic_write import replacing

WARNED_CODE = 128 + signal.SIGUSR1
TIME_LIMIT = "SIGUSR1, the time limit is near"


class JobState(Enum):
    """What Slurm does with a job."""

    RUNNING = "nothing"
    PREEMPTED = "it wants the nodes for another job, and has sent SIGTERM"
    ENDING = "it ends it: scancel, the time limit, or a preemption that requeues by itself"

    @classmethod
    def of(cls, shown: str, *, was_terminated: bool) -> JobState:
        """Read it from `scontrol show job`; `was_terminated` is whether SIGTERM came."""
        values = dict(re.findall(r"(\S+?)=(\S*)", shown))
        if values.get("JobState") != "RUNNING":
            return cls.ENDING
        if values.get("PreemptTime", "None") != "None":
            return cls.PREEMPTED  # a job that ends in its grace time counts as ended, and not as preempted
        return cls.ENDING if was_terminated else cls.RUNNING


@dataclass(frozen=True)
class JobRecord:
    """What a job remembers of its starts.

    Attributes:
        code: exit code of its last start.
        reason: why that ended.
        position: of the newest checkpoint that any start has saved, -1 for none.
        failures: reasons since then why starts have ended, without numbers.
    """

    code: int = 0
    reason: str = ""
    position: int = -1
    failures: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> JobRecord:
        """Read the record that an earlier start has written; an empty one if there is none."""
        try:
            values = json.loads(path.read_text())
            return cls(**{**values, "failures": tuple(values["failures"])})
        except (OSError, ValueError, TypeError, KeyError):
            return cls()

    def write(self, path: Path) -> None:
        """Write the record, for the next start."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(dataclasses.asdict(self)))


@dataclass(frozen=True)
class RequeueDecision:
    """Whether the job is requeued, the line that gives the reason, and the record for the next start."""

    requeue: bool
    line: str
    record: JobRecord


def what_follows(last: JobRecord, earlier: JobRecord, state: JobState) -> RequeueDecision:
    """Decide whether a job is requeued after a start of it has ended.

    Args:
        last: of the start that has ended.
        earlier: the record of those before it.
        state: what Slurm does with the job.
    """
    if last.code == 0 or state is JobState.ENDING:
        return RequeueDecision(False, "", last)
    if last.position > earlier.position:
        earlier = JobRecord(position=last.position)
    if state is JobState.PREEMPTED:
        return RequeueDecision(True, "preempted: requeued", earlier)
    is_limit = last.code == WARNED_CODE
    if last.code in FINAL_CODES and not is_limit:
        return RequeueDecision(False, "", last)
    reason = TIME_LIMIT if is_limit else last.reason or f"exit code {last.code}"
    # "no sign of life for 11 s" and "... 12 s" are the same failure; so are those of two nodes.
    failure = re.sub(r"\d+", "N", reason)
    record = JobRecord(last.code, reason, earlier.position, (*earlier.failures, failure))
    if failure in earlier.failures:
        return RequeueDecision(False, f"{reason}: as before, and no newer checkpoint since: not requeued", record)
    return RequeueDecision(True, f"{reason}: requeued, goes on from its newest checkpoint", record)
