"""Whether a Slurm job that has ended is worth another start."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from launch.node_run import FINAL_CODES

WARNED_CODE = 128 + signal.SIGUSR1
TIME_LIMIT = "SIGUSR1, the time limit is near"


class Fate(Enum):
    """What Slurm does with a job."""

    RUNNING = "nothing"
    PREEMPTED = "it wants the nodes for another job, and has sent SIGTERM"
    ENDING = "it ends it: scancel, the time limit, or a preemption that requeues by itself"

    @classmethod
    def of(cls, shown: str, *, was_told: bool) -> Fate:
        """Read it from `scontrol show job`; `was_told` is whether SIGTERM came."""
        values = dict(re.findall(r"(\S+?)=(\S*)", shown))
        if values.get("JobState") != "RUNNING":
            return cls.ENDING
        if values.get("PreemptTime", "None") != "None":
            return cls.PREEMPTED  # a job that ends in its grace time counts as ended, and not as preempted
        return cls.ENDING if was_told else cls.RUNNING


@dataclass(frozen=True)
class Progress:
    """How far a job has come.

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
    def after(cls, code: int, outcome: Path) -> Progress:
        """Read what a launch that ended with `code` has left with --outcome; it may have been killed before."""
        try:
            left = json.loads(outcome.read_text())
            return cls(code, left["reason"], left["position"])
        except (OSError, ValueError, KeyError):
            return cls(code, f"the launch ended with {code}")

    @classmethod
    def read(cls, path: Path) -> Progress:
        """Read the record that an earlier start has written, an empty one where there is none."""
        try:
            values = json.loads(path.read_text())
            return cls(**{**values, "failures": tuple(values["failures"])})
        except (OSError, ValueError, TypeError, KeyError):
            return cls()

    def write(self, path: Path) -> None:
        """Write the record, for the next start."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(dataclasses.asdict(self)))
        unfinished.replace(path)


@dataclass(frozen=True)
class Decision:
    """What follows: whether the job is requeued, the line that says why, and the record for the next start."""

    requeue: bool
    line: str
    progress: Progress


def what_follows(last: Progress, earlier: Progress, fate: Fate) -> Decision:
    """Decide whether a job is requeued after a start of it has ended.

    Args:
        last: of the start that has ended.
        earlier: the record of those before it.
        fate: what Slurm does with the job.
    """
    if last.code == 0 or fate is Fate.ENDING:
        return Decision(False, "", last)
    if last.position > earlier.position:
        earlier = Progress(position=last.position)
    if fate is Fate.PREEMPTED:
        return Decision(True, "preempted: requeued", earlier)
    is_limit = last.code == WARNED_CODE
    if last.code in FINAL_CODES and not is_limit:
        return Decision(False, "", last)
    reason = TIME_LIMIT if is_limit else last.reason or f"exit code {last.code}"
    # "no sign of life for 11 s" and "... 12 s" are the same failure; so are those of two nodes.
    failure = re.sub(r"\d+", "N", reason)
    progress = Progress(last.code, reason, earlier.position, (*earlier.failures, failure))
    if failure in earlier.failures:
        return Decision(False, f"{reason}: as before, and no newer checkpoint since: not requeued", progress)
    return Decision(True, f"{reason}: requeued, goes on from its newest checkpoint", progress)
