"""What the doctor found: one row a check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "wrong"]
HOSTS_NAMED, FINDINGS_SHOWN = 4, 2


@dataclass(frozen=True)
class Row:
    """One line of the doctor's table.

    Attributes:
        check: what was looked at, a few words.
        verdict: "wrong" keeps a training from running or makes it another one; "warning" makes it slower or may end it.
        found: what was found, one line.
        cure: what to do about it, one line; '' where nothing is to be done.
        host: the machine it is about; '' for all of them, or none in particular.
    """

    check: str
    verdict: Verdict
    found: str
    cure: str = ""
    host: str = ""


def join_hosts(rows: Iterable[Row]) -> list[Row]:
    """Make one row of those that say the same of several hosts, and one of all that are ok; in their order."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = (row.check, row.verdict) if row.verdict == "ok" else (row.check, row.verdict, row.found, row.cure)
        groups.setdefault(key, []).append(row)
    joined = []
    for group in groups.values():
        found = list(dict.fromkeys(row.found for row in group))
        more = f"; and {len(found) - FINDINGS_SHOWN} more" if len(found) > FINDINGS_SHOWN else ""
        host = some_of([row.host for row in group if row.host])
        joined.append(
            Row(group[0].check, group[0].verdict, "; ".join(found[:FINDINGS_SHOWN]) + more, group[0].cure, host)
        )
    return joined


def some_of(names: list[str]) -> str:
    """Write the first names, and how many more there are."""
    more = len(names) - HOSTS_NAMED
    return ", ".join(names[:HOSTS_NAMED]) + (f" and {more} more" if more > 0 else "")
