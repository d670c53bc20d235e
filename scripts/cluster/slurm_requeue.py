"""Whether a Slurm job that has ended is worth another start."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

from scripts.attempt import FINAL_CODES

WARNED_CODE = 138  # stopped by SIGUSR1
TIME_LIMIT = "the time limit is near"


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


def what_follows(last: Progress, earlier: Progress, *, had_warning: bool) -> Decision:
    """Decide whether a job is requeued after a start of it has ended.

    Args:
        last: of the start that has ended.
        earlier: the record of those before it.
        had_warning: whether Slurm had announced the time limit.
    """
    is_limit = had_warning and last.code == WARNED_CODE
    if (last.code == 0 or last.code in FINAL_CODES) and not is_limit:  # a preempted job is requeued by Slurm itself
        return Decision(False, "", last)
    reason = TIME_LIMIT if is_limit else last.reason or f"exit code {last.code}"
    # "no sign of life for 11 s" and "... 12 s" are the same failure; so are those of two nodes.
    failure = re.sub(r"\d+", "N", reason)
    has_moved = last.position > earlier.position
    failures = () if has_moved else earlier.failures
    progress = Progress(last.code, reason, max(last.position, earlier.position), (*failures, failure))
    if failure in failures:
        return Decision(False, f"{reason}: as before, and no newer checkpoint since: not requeued", progress)
    return Decision(True, f"{reason}: requeued, goes on from its newest checkpoint", progress)
