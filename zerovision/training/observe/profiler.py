"""`--profile N`: writes a trace of N steps of rank 0 for Perfetto or TensorBoard, and lists the costliest operators."""

from __future__ import annotations

import warnings
from operator import attrgetter
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from zerovision.training.base.points import Loggers
from zerovision.training.base.timing import SpanClock
from zerovision.training.base.units import plural
from zerovision.training.observe.observer import Observer, StepDone

WARM_UP_STEPS = 5  # before the trace; fewer if the epoch is too short
OPERATORS_LISTED = 10


class StepProfiler(Observer):
    """Traces steps of the first epoch that this process trains."""

    def __init__(self, steps: int, steps_per_epoch: int, folder: Path, clock: SpanClock, loggers: Loggers) -> None:
        """Prepare the profiler without starting it.

        Args:
            steps: number of optimizer steps to trace; 0 for no trace.
            steps_per_epoch: number of optimizer steps per epoch.
            folder: folder for `trace.json.gz` and `summary.txt`.
            clock: clock whose spans appear in the trace.
            loggers: loggers that receive one line when the trace has been written or could not be written.
        """
        self._steps, self._steps_per_epoch = steps, steps_per_epoch
        self._folder, self._clock, self._loggers = folder, clock, loggers
        self._profile: profile | None = None
        self._warm_up_steps = 0

    def before_step(self, position: int) -> None:
        """Start the profiler before the first step of this process."""
        if self._steps == 0:
            return
        steps = self._steps_per_epoch - position % self._steps_per_epoch
        self._steps, asked = 0, self._steps
        self._warm_up_steps = warm_up = max(0, min(WARM_UP_STEPS, steps - asked))
        with warnings.catch_warnings(action="ignore"):  # about a missing warm-up
            actions = schedule(wait=0, warmup=warm_up, active=min(asked, steps), repeat=1)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=activities, schedule=actions, on_trace_ready=self._write)
        self._profile.start()
        self._clock.is_recording = warm_up == 0

    def after_step(self, done: StepDone) -> None:
        """Count an optimizer step, and write the files after the last traced step."""
        if self._profile is None:
            return
        self._profile.step()
        self._clock.is_recording = self._profile.step_num >= self._warm_up_steps
        if self._profile.current_action == ProfilerAction.NONE:
            self.after_steps()

    def after_steps(self) -> None:
        """Write the trace, even if a signal ended the epoch before its last step."""
        if self._profile is not None:
            self._profile.stop()
        self._profile, self._clock.is_recording = None, False

    def _write(self, trace: profile) -> None:
        steps = trace.step_num - self._warm_up_steps
        if steps == 0:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(self._folder / "trace.json.gz"))
            (self._folder / "summary.txt").write_text(costliest_operators(trace, steps))
        except OSError as error:
            self._loggers.message(f"note: the profile cannot be written: {error}")
        else:
            self._loggers.message(f"profile of {plural(steps, 'step')}: {self._folder}/trace.json.gz, summary.txt")


def costliest_operators(trace: profile, steps: int) -> str:
    """Return a table of the operators with the most self time, on the GPU if one is used."""
    events = [event for event in trace.key_averages() if not event.is_user_annotation]
    # Each GPU kernel has a row of its own, and its time is also attributed to the operator that launched it.
    operators = [event for event in events if event.device_type == DeviceType.CPU]
    kernels = [event for event in events if event.device_type != DeviceType.CPU]
    key = "self_device_time_total" if kernels else "self_cpu_time_total"
    total = max(sum(getattr(event, key) for event in kernels or operators), 1e-9)
    lines = [f"{plural(steps, 'step')} of rank 0; {'GPU' if kernels else 'CPU'} time of the operator itself", ""]
    lines.append(f"{'share':>7} {'ms/step':>10} {'calls/step':>13}  operator")
    for event in sorted(operators, key=attrgetter(key), reverse=True)[:OPERATORS_LISTED]:
        time, calls = getattr(event, key), event.count / steps
        lines.append(f"{time / total:7.1%} {time / 1000 / steps:10.3f} {calls:13.1f}  {event.key}")
    return "\n".join(lines) + "\n"
