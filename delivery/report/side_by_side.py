"""What several runs have of the same kind, laid side by side by its name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from delivery.report.run_facts import Setting


class Named(Protocol):
    """What has a name."""

    @property
    def name(self) -> str:
        """Unique among those of a run."""


Entry = TypeVar("Entry", bound=Named)


def side_by_side(runs: Sequence[Iterable[Entry]]) -> list[tuple[str, list[Entry | None]]]:
    """Return each name, in the order of its first run, with the entry of every run; None where a run lacks it."""
    by_name = [{entry.name: entry for entry in run} for run in runs]
    names = dict.fromkeys(name for entries in by_name for name in entries)
    return [(name, [entries.get(name) for entries in by_name]) for name in names]


def differences(runs: Sequence[Iterable[Setting]]) -> list[tuple[str, list[str]]]:
    """Return name and value of each run, of what is not the same in all of them; '–' where a run lacks it."""
    values = [(name, [row.value if row else "–" for row in rows]) for name, rows in side_by_side(runs)]
    return [(name, row) for name, row in values if len(set(row)) > 1]
