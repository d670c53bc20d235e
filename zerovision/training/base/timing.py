"""Where the time of a run goes: a clock that attributes every moment to the innermost open span.

Spans nest: the time inside a collective counts as communication, not as part of the enclosing backward pass, so the
shares of all spans add up to 1. On a CPU, the clock is the host's. On a GPU, an event is recorded in the compute stream
at each change of span, and events are read only at logging points, so that steps never wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

SPANS = ("data", "forward", "backward", "communication", "optimizer", "logging", "saving", "other", "evaluation")
ABSORBING = ("saving", "evaluation")  # time in spans nested inside these spans counts toward them
MOST_PENDING_EVENTS = 4096
_clocks: list[SpanClock] = []  # clocks of this process's active runs, the innermost last


class HostMarks:
    """A timeline of the host's clock, on which a span ends at each mark."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(SPANS, 0.0)
        self._last = time.perf_counter()

    def end(self, span: str) -> None:
        """Attribute the time since the last mark to `span`."""
        now = time.perf_counter()
        self._seconds[span] += now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each span so far; on a GPU, this synchronizes."""
        return dict(self._seconds)


class StreamMarks:
    """A timeline of a GPU stream: events (with timing enabled) that complete when the work before them is done."""

    def __init__(self, stream: Any, new_event: Callable[[], Any]) -> None:
        self._stream, self._new_event = stream, new_event
        self._seconds = dict.fromkeys(SPANS, 0.0)
        self._spare: list[Any] = []
        self._pending: deque[tuple[str, Any]] = deque()
        self._last = new_event()
        self._last.record(stream)

    def end(self, span: str) -> None:
        event = self._spare.pop() if self._spare else self._new_event()
        event.record(self._stream)
        self._pending.append((span, event))
        if len(self._pending) > MOST_PENDING_EVENTS:
            self._read_completed()

    def seconds(self) -> dict[str, float]:
        if self._pending:
            self._pending[-1][1].synchronize()
        self._read_completed()
        return dict(self._seconds)

    def _read_completed(self) -> None:
        while self._pending and self._pending[0][1].query():
            span, event = self._pending.popleft()
            self._seconds[span] += self._last.elapsed_time(event) / 1000
            self._spare.append(self._last)
            self._last = event


class SpanClock:
    """Measures spans of one rank, such as `with clock.forward:`. Only one thread at a time may be inside spans."""

    def __init__(self, marks: HostMarks | StreamMarks | None = None) -> None:
        self._marks = marks or HostMarks()
        self._thread = threading.get_ident()
        self._open = ["other"]
        self._records: list[Any] = []
        self.is_recording = False  # whether the spans appear in torch.profiler's trace
        self.data, self.forward, self.backward = (Span(self, name) for name in SPANS[:3])
        self.communication, self.optimizer, self.logging = (Span(self, name) for name in SPANS[3:6])
        self.saving, self.evaluation = Span(self, "saving"), Span(self, "evaluation")

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each span since the clock was created; on a GPU, this synchronizes."""
        self._marks.end(self._open[-1])
        return self._marks.seconds()

    def belongs_here(self) -> bool:
        """Return whether to measure here: on the training thread, or on autograd's thread during the backward pass.

        The thread that writes checkpoints is not measured, nor is the capture of a CUDA graph.
        """
        is_training = threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1
        is_recorded = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return is_training and not is_recorded

    def enter(self, name: str) -> None:
        """Open a span inside the current one."""
        outer = self._open[-1]
        self._marks.end(outer)
        self._open.append(outer if outer in ABSORBING else name)
        if self.is_recording or self._records:
            record = torch.profiler.record_function(name)
            record.__enter__()
            self._records.append(record)

    def leave(self) -> None:
        """Close the innermost span."""
        self._marks.end(self._open.pop())
        if self._records:
            self._records.pop().__exit__(None, None, None)


class Span(AbstractContextManager[None]):
    """A named part of the time; a reusable context manager."""

    def __init__(self, clock: SpanClock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._clock.enter(self._name)

    def __exit__(self, *_error: object) -> None:
        self._clock.leave()


def start_clock(device: torch.device) -> SpanClock:
    """Return a clock for a device: the current stream's on a GPU, the host's elsewhere."""
    if device.type != "cuda":
        return SpanClock()
    return SpanClock(StreamMarks(torch.cuda.current_stream(device), lambda: torch.cuda.Event(enable_timing=True)))


@contextmanager
def measured_communication(clock: SpanClock) -> Iterator[None]:
    """Make `communication` use this clock inside the block."""
    _clocks.append(clock)
    try:
        yield
    finally:
        _clocks.pop()


def communication() -> AbstractContextManager[None]:
    """Return the span in which to start a collective and wait for it; outside a run, the span measures nothing.

    On a CPU, the span measures the host's time. On a GPU, it measures how long the compute stream waits; a collective
    that overlaps with computation on another stream does not count.
    """
    clock = _clocks[-1] if _clocks else None
    return clock.communication if clock is not None and clock.belongs_here() else nullcontext()


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return each span's share of the time excluding evaluation; the shares add up to 1."""
    training = {name: value for name, value in seconds.items() if name != "evaluation"}
    total = max(sum(training.values()), 1e-9)
    return {name: value / total for name, value in training.items()}


def mean_shares(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each span's share, averaged over the ranks."""
    by_rank = [shares(seconds) for seconds in ranks]
    return {name: sum(rank[name] for rank in by_rank) / len(by_rank) for name in by_rank[0]}
