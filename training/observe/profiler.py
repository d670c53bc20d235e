"""`--profile N`: a trace of N steps of rank 0, for Perfetto or TensorBoard, and the costliest operators as text."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from training.observe.loggers import Loggers
from training.observe.timing import SpanClock

WARM_UP_STEPS = 5  # before the trace, unless the epoch is too short for them
OPERATORS_LISTED = 10


class StepProfiler:
    """Traces steps of the first epoch that this process trains; with 0 steps it does nothing."""

    def __init__(self, steps: int, folder: Path, clock: SpanClock, loggers: Loggers) -> None:
        """Prepare; nothing runs yet.

        Args:
            steps: optimizer steps to trace.
            folder: where `trace.json.gz` and `summary.txt` go.
            clock: its spans appear in the trace.
            loggers: where it is said that the trace is written, or why it cannot be.
        """
        self._steps, self._folder, self._clock, self._loggers = steps, folder, clock, loggers
        self._profile: profile | None = None
        self._step_record: Any = None
        self._warm_up_left = self._traced = 0

    def begin_epoch(self, steps: int) -> None:
        """Prepare the trace before the first epoch of this process, which has `steps` steps left."""
        if self._steps == 0 or steps == 0:
            return
        self._steps, asked = 0, self._steps
        self._warm_up_left = max(0, min(WARM_UP_STEPS, steps - asked))
        self._left = min(asked, steps)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=activities)
        self._profile.prepare_trace()
        if self._warm_up_left == 0:
            self._start()

    def after_step(self) -> None:
        """Count an optimizer step; after the last one to be traced, write the files."""
        if self._profile is None:
            return
        if self._warm_up_left > 0:
            self._warm_up_left -= 1
            if self._warm_up_left == 0:
                self._start()
            return
        self._traced += 1
        self._step_record.__exit__(None, None, None)
        if self._traced == self._left:
            self._stop()
        else:
            self._begin_step()

    def end_epoch(self) -> None:
        """Write what was traced, where the epoch ends before its last step: a signal has ended it."""
        if self._profile is not None and self._step_record is not None:
            self._step_record.__exit__(None, None, None)
            self._stop()
        self._profile = None

    def _start(self) -> None:
        assert self._profile is not None
        self._clock.is_recording = True
        self._profile.start_trace()
        self._begin_step()

    def _begin_step(self) -> None:
        self._step_record = record_function(f"ProfilerStep#{self._traced}")  # the name that TensorBoard looks for
        self._step_record.__enter__()

    def _stop(self) -> None:
        assert self._profile is not None
        trace, self._profile = self._profile, None
        self._clock.is_recording = False
        trace.stop_trace()
        try:
            self._folder.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(self._folder / "trace.json.gz"))
            (self._folder / "summary.txt").write_text(costliest_operators(trace, self._traced))
        except OSError as error:
            self._loggers.message(f"note: the profile cannot be written: {error}")
            return
        self._loggers.message(f"profile of {self._traced} step(s) written: {self._folder}/trace.json.gz, summary.txt")


def costliest_operators(trace: profile, steps: int) -> str:
    """Write a table of the operators that took most time themselves, on the GPU where there is one."""
    events = [event for event in trace.key_averages() if not event.is_user_annotation]
    # What ran on a GPU has rows of its own, kernel by kernel, and counts for the operator that launched it as well.
    operators = [event for event in events if event.device_type == DeviceType.CPU]
    kernels = [event for event in events if event.device_type != DeviceType.CPU]
    key = "self_device_time_total" if kernels else "self_cpu_time_total"
    total = max(sum(getattr(event, key) for event in kernels or operators), 1e-9)
    lines = [f"{steps} step(s) of rank 0; {'GPU' if kernels else 'CPU'} time in the operator itself", ""]
    lines.append(f"{'share':>7} {'ms a step':>10} {'calls a step':>13}  operator")
    for event in sorted(operators, key=attrgetter(key), reverse=True)[:OPERATORS_LISTED]:
        time, calls = getattr(event, key), event.count / steps
        lines.append(f"{time / total:7.1%} {time / 1000 / steps:10.3f} {calls:13.1f}  {event.key}")
    return "\n".join(lines) + "\n"
