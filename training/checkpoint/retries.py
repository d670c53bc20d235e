"""When a failed save is tried again, and after how long a time of failures the run has to end."""

from __future__ import annotations

import math
from collections.abc import Callable

SHORTEST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 120.0
GIVE_UP_SECONDS = 600.0  # of saves that all failed: a disk that somebody makes room on, a file server that starts again
GIVE_UP_SECONDS_OF_STOP = 60.0  # who asked a run to stop, a person or a scheduler, waits for its end


class FailedSaves:
    """The failures since the last save that went well, on one rank's clock.

    The waiting time doubles: the next try comes when the failures have lasted twice as long as at the last one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Count no failure yet; `clock` returns seconds that never go back."""
        self._clock = clock
        self._since: float | None = None
        self._retry_at = math.inf
        self.give_up_s = GIVE_UP_SECONDS

    def __bool__(self) -> bool:
        """Whether the last save failed."""
        return self._since is not None

    def note(self, failed: bool) -> None:
        """Take in how a save ended."""
        if not failed:
            self._since, self._retry_at = None, math.inf
            return
        if self._since is None:
            self._since = self._clock()
        self._retry_at = self._clock() + self.delay_s()

    def last_s(self) -> float:
        """Return for how many seconds saves have been failing."""
        return 0.0 if self._since is None else self._clock() - self._since

    def are_too_many(self) -> bool:
        """Return whether another try is not worth waiting for."""
        return self._since is not None and self.last_s() >= self.give_up_s

    def delay_s(self) -> float:
        """Return the seconds from a failure now to the next try."""
        left_s = max(self.give_up_s - self.last_s(), 0.0)
        return min(max(self.last_s(), SHORTEST_RETRY_SECONDS), LONGEST_RETRY_SECONDS, left_s)

    def take_retry(self) -> bool:
        """Return once after each failure that the time for the next try has come."""
        if self._clock() < self._retry_at:
            return False
        self._retry_at = math.inf
        return True
