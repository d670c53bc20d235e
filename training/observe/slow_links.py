"""Names the hosts whose exchange with the others is slow.

The rank that comes last to an exchange waits for nobody: what it spends there is the exchange itself. Once that is a
large share of a step, the links between neighbouring hosts, laid in a ring, are timed with a small message, over the
same backend that the step uses. One slow link slows the whole exchange of all ranks, so their own times do not tell
whose it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from training.parallel.collectives import gather_rows
from training.parallel.world import World

LARGE_SHARE = 0.3  # of a step
POINTS_IN_ROW = 2
SHORTEST_INTERVAL_STEPS = 5
SECONDS_UNTIL_TOLD_AGAIN = 600.0
PROBE_SHARE = 0.01  # of the time, at most about so much goes into probes
PROBE_BYTES = 2**18
PROBES = 3  # of each link; the fastest holds
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
        """Return the line for people."""
        count = len(self.hosts)
        who = f"between all {count} hosts" if count > 2 else f"between hosts {' and '.join(self.hosts)}"
        who = f"with host {self.hosts[0]}" if count == 1 else who
        others = self.others_probe_seconds
        beside = "" if others is None else f", {1000 * others:.3g} ms between the others (median)"
        return (
            f"the exchange {who} is slow and takes {self.communication_share:.0%} of a step: {PROBE_BYTES // 1024} KiB "
            f"there and back take {1000 * self.probe_seconds:.3g} ms{beside}"
        )


def exchange_share(ranks: Sequence[Mapping[str, float]]) -> float:
    """Return which share of its time the rank that waits for nobody spends in collectives.

    Args:
        ranks: of each rank the seconds of its spans.
    """
    last = min(ranks, key=lambda rank: rank["communication"])
    total = sum(seconds for name, seconds in last.items() if name != "evaluation")
    return last["communication"] / max(total, 1e-9)


def judge_ring(hosts: Sequence[str], seconds: Sequence[float]) -> tuple[tuple[str, ...], float, float | None] | None:
    """Find whose exchange is slow: (hosts, their link's seconds, the median of the others'), None if nobody's.

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


class SlowLinkWatch:
    """Looks at the exchange at each logging point. What it decides by is the same on all ranks, so they decide alike.

    Args:
        hosts: name of each rank's machine, by rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._starts = {host: rank for rank, host in reversed([*enumerate(hosts)])}
        self._hosts = sorted(self._starts, key=self._starts.__getitem__)
        self._ranks: list[dict[str, float]] = []
        self._steps = self._points_in_row = 0
        self._seconds = self._next_probe_at = 0.0
        self._told_at: dict[tuple[str, ...], float] = {}

    def judge(self, ranks: Sequence[Mapping[str, float]], steps: int, world: World) -> SlowLink | None:
        """Return whose exchange is slow, if the exchange takes long and it was not named of late; a collective.

        Args:
            ranks: of each rank the seconds of its spans since the last call, the same on all ranks.
            steps: optimizer steps since the last call.
            world: the ranks.
        """
        share = self._share_if_due(ranks, steps)
        if share is None:
            return None
        probes = time_ring([self._starts[host] for host in self._hosts], world)
        self._next_probe_at = self._seconds + PROBES * max(probes) / PROBE_SHARE
        found = judge_ring(self._hosts, probes)
        if found is None or self._seconds < self._told_at.get(found[0], 0.0):
            return None
        self._told_at[found[0]] = self._seconds + SECONDS_UNTIL_TOLD_AGAIN
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
        self._points_in_row = self._points_in_row + 1 if share >= LARGE_SHARE else 0
        return share if self._points_in_row >= POINTS_IN_ROW and self._seconds >= self._next_probe_at else None


def time_ring(starts: Sequence[int], world: World) -> list[float]:
    """Return the seconds of `PROBE_BYTES` there and back from each host to the next one of the ring; a collective.

    Args:
        starts: the first rank of each host, two or more; a pair has one link.
        world: the ranks.
    """
    count, own = len(starts), 0.0
    # No host has two links in a round: none is timed while another slows it.
    rounds = [range(0, count - 1, 2), range(1, count - 1, 2), range(count - 1, count) if count > 2 else ()]
    for first in (first for links in rounds for first in links):
        leader, follower = starts[first], starts[(first + 1) % count]
        if world.rank == leader:
            own = _time_link(follower, world.device)
        elif world.rank == follower:
            _answer_link(leader, world.device)
    rows = gather_rows(torch.tensor([own], dtype=torch.float64, device=world.device), world)[:, 0].tolist()
    return [rows[start] for start in starts[: 1 if count == 2 else count]]


def _time_link(peer: int, device: torch.device) -> float:
    message, found = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device), []
    for number in range(PROBES + 1):
        part = message if number else message[:1]  # the first one connects
        start = time.perf_counter()
        dist.send(part, peer)
        dist.recv(part, peer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _answer_link(peer: int, device: torch.device) -> None:
    message = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)
    for number in range(PROBES + 1):
        part = message if number else message[:1]
        dist.recv(part, peer)
        dist.send(part, peer)
