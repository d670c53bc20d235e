"""Detects hosts whose exchange with the others is slow.

The rank that comes last to a collective waits for nobody: its time there is the exchange itself. If that is a large
share of a step, the links between neighbouring hosts of a ring are timed with a small message, over the backend that
the step uses. One slow link slows the whole exchange of all ranks, so their own times do not show whose it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from training.observe.slow_ranks import CONSECUTIVE_POINTS, SECONDS_BETWEEN_REPORTS, SHORTEST_INTERVAL_STEPS
from training.parallel.collectives import gather_rows
from training.parallel.world import World

LARGE_SHARE = 0.3  # of a step
PROBE_SHARE = 0.01  # of the time, at most about so much goes into probes
PROBE_BYTES = 2**18
PROBES = 3  # of each link; the fastest counts
SLOW_FACTOR = 3.0
# There and back: 100 Mbit/s take 0.042 s, 1 Gbit/s takes 0.004 s.
SLOW_ANYWHERE_SECONDS = 0.05
SLOW_BESIDE_OTHERS_SECONDS = 0.01


class SlowLink(NamedTuple):
    """Hosts whose exchange is slow.

    Attributes:
        hosts: one that is slow with all its neighbours, else the two ends of a link, else all.
        probe_seconds: of `PROBE_BYTES` there and back.
        others_probe_seconds: the median of the links without these hosts, None if there is no other.
        communication_share: of a step, by the rank that waits for nobody.
    """

    hosts: tuple[str, ...]
    probe_seconds: float
    others_probe_seconds: float | None
    communication_share: float

    def describe(self) -> str:
        """Return the line for the log."""
        who = f"between all {len(self.hosts)} hosts"
        if len(self.hosts) < 3:
            who = f"between hosts {' and '.join(self.hosts)}" if len(self.hosts) == 2 else f"with host {self.hosts[0]}"
        others = self.others_probe_seconds
        beside = "" if others is None else f", {1000 * others:.3g} ms between the others (median)"
        return (
            f"the exchange {who} is slow and takes {self.communication_share:.0%} of a step: {PROBE_BYTES // 1024} KiB "
            f"there and back take {1000 * self.probe_seconds:.3g} ms{beside}"
        )


def exchange_share(ranks: Sequence[Mapping[str, float]]) -> float:
    """Return the share of its time that the rank that waits for nobody spends in collectives.

    Args:
        ranks: of each rank the seconds of its spans.
    """
    last = min(ranks, key=lambda rank: rank["communication"])
    total = sum(seconds for name, seconds in last.items() if name != "evaluation")
    return last["communication"] / max(total, 1e-9)


def find_slow_link(
    hosts: Sequence[str], seconds: Sequence[float]
) -> tuple[tuple[str, ...], float, float | None] | None:
    """Return whose exchange is slow (hosts, their link's seconds, the median of the others'), None if nobody's.

    Args:
        hosts: in the order of the ring.
        seconds: of each host's link to the next one; a single link for two hosts.
    """
    count = len(hosts)
    if count == 2:
        return (tuple(hosts), seconds[0], None) if seconds[0] > SLOW_ANYWHERE_SECONDS else None
    best = [min(seconds[number - 1], seconds[number]) for number in range(count)]
    for number in sorted(range(count), key=best.__getitem__, reverse=True):
        others = statistics.median(best[:number] + best[number + 1 :])
        if best[number] > max(SLOW_FACTOR * others, SLOW_BESIDE_OTHERS_SECONDS):
            return (hosts[number],), best[number], others
    slowest = max(range(count), key=seconds.__getitem__)
    others = statistics.median([*seconds[:slowest], *seconds[slowest + 1 :]])
    if seconds[slowest] > max(SLOW_FACTOR * others, SLOW_BESIDE_OTHERS_SECONDS):
        return (hosts[slowest], hosts[(slowest + 1) % count]), seconds[slowest], others
    return (tuple(hosts), others, None) if min(seconds) > SLOW_ANYWHERE_SECONDS else None


class SlowLinkDetector:
    """Examines the exchange at each logging point; all ranks get the same numbers and come to the same decision.

    Args:
        hosts: name of each rank's machine, by rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._first_ranks = {host: rank for rank, host in reversed([*enumerate(hosts)])}
        self._hosts = sorted(self._first_ranks, key=self._first_ranks.__getitem__)
        self._ranks: list[dict[str, float]] = []
        self._steps = self._slow_points = 0
        self._seconds = self._next_probe_at = 0.0
        self._next_report_at: dict[tuple[str, ...], float] = {}

    def update(self, ranks: Sequence[Mapping[str, float]], steps: int, world: World) -> SlowLink | None:
        """Return whose exchange is slow, if the exchange takes long and it was not reported recently; a collective.

        Args:
            ranks: of each rank the seconds of its spans since the last call, the same on all ranks.
            steps: optimizer steps since the last call.
            world: the ranks.
        """
        share = self._share_if_due(ranks, steps)
        if share is None:
            return None
        probes = time_ring([self._first_ranks[host] for host in self._hosts], world)
        self._next_probe_at = self._seconds + PROBES * max(probes) / PROBE_SHARE
        found = find_slow_link(self._hosts, probes)
        if found is None or self._seconds < self._next_report_at.get(found[0], 0.0):
            return None
        self._next_report_at[found[0]] = self._seconds + SECONDS_BETWEEN_REPORTS
        return SlowLink(*found, communication_share=share)

    def _share_if_due(self, ranks: Sequence[Mapping[str, float]], steps: int) -> float | None:
        """Return the exchange's share of a step, if it is large and the links may be probed now."""
        if len(self._hosts) < 2:
            return None
        before = self._ranks or [dict.fromkeys(rank, 0.0) for rank in ranks]
        self._ranks = [{name: old[name] + new[name] for name in new} for old, new in zip(before, ranks, strict=True)]
        self._seconds += sum(ranks[0].values())
        self._steps += steps
        if self._steps < SHORTEST_INTERVAL_STEPS:
            return None
        share = exchange_share(self._ranks)
        self._ranks, self._steps = [], 0
        self._slow_points = self._slow_points + 1 if share >= LARGE_SHARE else 0
        return share if self._slow_points >= CONSECUTIVE_POINTS and self._seconds >= self._next_probe_at else None


def time_ring(first_ranks: Sequence[int], world: World) -> list[float]:
    """Return the seconds of `PROBE_BYTES` there and back from each host to the next one of the ring; a collective.

    Args:
        first_ranks: of the hosts, two or more; a pair has one link.
        world: the ranks.
    """
    count, own = len(first_ranks), 0.0
    # No host has two links in a round: none is timed while another slows it.
    rounds = [range(0, count - 1, 2), range(1, count - 1, 2), range(count - 1, count) if count > 2 else ()]
    for first in (first for links in rounds for first in links):
        leader, follower = first_ranks[first], first_ranks[(first + 1) % count]
        if world.rank == leader:
            own = _time_link(follower, (dist.send, dist.recv), world.device)
        elif world.rank == follower:
            _time_link(leader, (dist.recv, dist.send), world.device)
    rows = gather_rows(torch.tensor([own], dtype=torch.float64, device=world.device), world)[:, 0].tolist()
    return [rows[rank] for rank in first_ranks[: 1 if count == 2 else count]]


def _time_link(peer: int, calls: Sequence[Callable[[torch.Tensor, int], object]], device: torch.device) -> float:
    """Return the seconds of the fastest of `PROBES` calls of both `calls`."""
    message, seconds = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device), []
    for number in range(PROBES + 1):
        part = message if number else message[:1]  # the first one connects
        start = time.perf_counter()
        for call in calls:
            call(part, peer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
