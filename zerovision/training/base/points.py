"""The numbers that a run logs, the lines of text that show them, and the interface of the loggers."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partialmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from zerovision.training.base.errors import printable
from zerovision.training.base.run_folder import as_typed
from zerovision.training.base.units import format_bytes, format_duration, percent

if TYPE_CHECKING:
    import torch

    from zerovision.training.tasks.scores import Scores

# The scores by which --best-by can choose the best epoch.
SCORE_NAMES = {
    "top1": "top-1",
    "top5": "top-5",
    "loss": "loss",
    "macro_f1": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "map": "mAP",
}
IN_EVERY_LINE = ("top1", "top5", "loss")
LONGEST_CLASS_NAME = 40


def show_score(name: str, value: float) -> str:
    """Format a score of `SCORE_NAMES`: the loss as a number, any other score as a percentage."""
    return f"{value:.4f}" if name == "loss" else percent(value)


def says_top5(classes: int, task: str) -> bool:
    """Return whether to show top-5: it is 100 % for up to 5 classes, and meaningless for several labels per image.

    For `task`, see `Scores`.
    """
    return classes > 5 and not task


def has_top5(scores: Mapping[str, Any]) -> bool:
    """Return the result of `says_top5` for the scores in a file."""
    return says_top5(len(scores["classes"]), scores.get("task", ""))


def merit(score: str, value: float | None) -> float:
    """Convert a score to a number for which more is better, or convert such a number back.

    A missing value or NaN is converted to a number that is worse than all others.
    """
    return -math.inf if value is None or math.isnan(value) else -value if score == "loss" else value


def score_in(epoch: Mapping[str, Any]) -> tuple[str, float]:
    """Return the name and value of the score in an epoch's line."""
    return epoch["best_by"], float(epoch["score"])


def best_epoch(epochs: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the line of the best epoch, or None if no score is a number; for ties, see `Progress.is_beaten_by`."""
    lines = (line for line in epochs if not line.get("diverged"))
    ranked = ((merit(*score_in(line)), merit("loss", line.get("val_loss")), -line["epoch"], line) for line in lines)
    best = max(ranked, key=lambda one: one[:3], default=(-math.inf, 0.0, 0, None))
    return best[3] if best[0] > -math.inf else None


class DeviceUse(NamedTuple):
    """Memory of rank 0, and utilization of the devices; None for unknown values.

    Attributes:
        memory_bytes: peak memory, of tensors on a GPU, or resident memory on a CPU.
        memory_allocated_bytes: current memory, of tensors on a GPU, or resident memory on a CPU.
        memory_reserved_bytes: memory that PyTorch has reserved on a GPU; None on a CPU.
        tflops_per_second: floating-point operations of the model per second and rank, in units of 10**12.
        mfu: model FLOPs utilization as in PaLM (arXiv 2204.02311, appendix B): `tflops_per_second` as a share of the
            device's 16-bit peak, for any training precision.
        gpu_utilization: share of recent time in which any kernel ran, from NVML.
        disk_free_bytes: free space on the disk that contains the run's folder.
    """

    memory_bytes: int
    memory_allocated_bytes: int
    memory_reserved_bytes: int | None
    tflops_per_second: float | None = None
    mfu: float | None = None
    gpu_utilization: float | None = None
    disk_free_bytes: int | None = None


@dataclass(frozen=True)
class StepPoint:
    """The numbers of a logging point, over all ranks and all steps since the previous logging point.

    Attributes:
        time_shares: share of the time in each span, averaged over the ranks.
        data_wait_share: share of the time spent waiting for data.
        cpu_utilization: for each machine, the share of its cores that were busy, with this run or anything else.
    """

    epoch: int
    step: int
    steps_per_epoch: int
    total_steps: int
    loss: float
    learning_rate: float
    images_per_second: float
    data_wait_share: float
    seconds: float
    seconds_left: float
    gradient_norm: float
    skipped_steps: int
    time_shares: Mapping[str, float]
    device: DeviceUse
    cpu_utilization: Mapping[str, float]

    @property
    def step_of_epoch(self) -> int:
        """The step within its epoch, counted from 1."""
        return (self.step - 1) % self.steps_per_epoch + 1


class ScoreSummary(NamedTuple):
    """The score that determines the best epoch, and the class that is recognized worst.

    Attributes:
        best_by: name of the score, one of `SCORE_NAMES`.
        score: its value in this epoch.
        lowest_recall: lowest recall among the classes with validation images.
        lowest_recall_class: the first class with that recall.
    """

    best_by: str
    score: float
    lowest_recall: float
    lowest_recall_class: str


@dataclass(frozen=True)
class EpochPoint:
    """The numbers of an epoch.

    Attributes:
        train_loss: training loss over the applied steps; None if no step was applied.
        train_top1: training accuracy over the applied steps; None if no step was applied.
        summary: the score that determines the best epoch, and the lowest recall, as `best_by`, `score`,
            `lowest_recall` and `lowest_recall_class`.
        data_wait_share: share of the time spent waiting for data, averaged over the ranks.
        memory_bytes_per_rank: peak memory of each rank; see `DeviceUse.memory_bytes`.
        diverged: the reason why the epoch has diverged; None if it has not.
    """

    epoch: int
    step: int
    epochs: int
    train_loss: float | None
    train_top1: float | None
    validation: Scores
    summary: ScoreSummary
    images_per_second: float
    data_wait_share: float
    seconds: float
    evaluation_seconds: float
    memory_bytes_per_rank: Sequence[int]
    is_best: bool
    diverged: str | None
    class_names: Sequence[str]


@dataclass(frozen=True)
class RunPoint:
    """The numbers of a run over all steps since this process started; see `StepPoint` and `EpochPoint` for fields."""

    step: int
    seconds: float
    evaluation_seconds: float
    images_per_second: float
    time_shares: Mapping[str, float]
    device: DeviceUse
    memory_bytes_per_rank: Sequence[int]


def flatten(point: StepPoint | RunPoint) -> dict[str, Any]:
    """Return a point's numbers by name, including those of its device."""
    values = dict(vars(point))
    device: DeviceUse = values.pop("device")
    return values | device._asdict()


def epoch_line(point: EpochPoint) -> str:
    """Return the line of an epoch on the console and in the text log."""
    scores, summary = point.validation, point.summary
    mark = "  diverged" if point.diverged else "  best" if point.is_best else ""
    chosen = ""
    if summary.best_by not in IN_EVERY_LINE:
        lowest = f"{percent(summary.lowest_recall)} ({printable(summary.lowest_recall_class)[:LONGEST_CLASS_NAME]})"
        chosen = f"  {SCORE_NAMES[summary.best_by]} {show_score(*summary[:2])}  lowest recall {lowest}"
    is_shown = summary.best_by == "top5" or says_top5(len(point.class_names), scores.task)
    top5 = f"  top-5 {percent(scores.top5)}" if is_shown else ""
    loss = "" if point.train_loss is None else f"train loss {point.train_loss:.4f}  "
    # If a solver computed the head, there are no training steps.
    speed = f"  {point.images_per_second:.0f} images/s  {point.seconds:.1f} s" if point.images_per_second else ""
    return (
        f"epoch {point.epoch}/{point.epochs}  {loss}val loss {scores.loss:.4f}  "
        f"top-1 {percent(scores.top1)}{top5}{chosen}{speed}{mark}"
    )


def step_numbers(point: StepPoint) -> str:
    """Return a logging point's numbers, without its position."""
    skipped = f"  skipped {point.skipped_steps}" if point.skipped_steps else ""
    return (
        f"loss {point.loss:.4f}  lr {point.learning_rate:.3g}  {point.images_per_second:.0f} images/s  "
        f"data wait {point.data_wait_share:.1%}  left {format_duration(point.seconds_left)}{skipped}"
    )


def run_lines(point: RunPoint) -> list[str]:
    """Return the lines at a run's end: time, speed and memory."""
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in point.time_shares.items())
    device = point.device
    speed = f"{point.images_per_second:.0f} images/s in {format_duration(point.seconds)}"
    speed += f", plus {format_duration(point.evaluation_seconds)} of evaluation"
    if device.tflops_per_second is not None:
        speed += f", {device.tflops_per_second:.3g} TFLOP/s per rank"
    if device.mfu is not None:
        speed += f", MFU {100 * device.mfu:.1f} %"
    memory = f"peak {format_bytes(device.memory_bytes)}, now {format_bytes(device.memory_allocated_bytes)}"
    if device.memory_reserved_bytes is not None:
        memory += f", reserved {format_bytes(device.memory_reserved_bytes)}"
    return [f"time         {shares}", f"speed        {speed}; memory of rank 0: {memory}"]


class RunLogger:
    """A destination of a run's numbers; a subclass overrides the methods for the things that it writes."""

    def message(self, message: str) -> None:
        """Log a human-readable line of text."""

    def event(self, kind: str, values: dict[str, Any]) -> None:
        """Log an event (a checkpoint, a skipped step, a resume) in machine-readable form."""

    def images(self, images: torch.Tensor) -> None:
        """Log a sample of augmented training images, float32 [N, 1 or 3, H, W] in 0..1."""

    def steps(self, point: StepPoint) -> None:
        """Log the numbers of a logging point."""

    def epoch(self, point: EpochPoint) -> None:
        """Log the end of an epoch."""

    def end(self, point: RunPoint) -> None:
        """Log the end of the run."""

    def delivered(self) -> None:
        """Process the complete run folder; called last, after report, evaluation and weights are written."""

    def close(self) -> None:
        """Flush and release files."""


class Loggers(RunLogger):
    """Passes every call to each logger in turn; only rank 0 has loggers.

    If a logger cannot write, for example on a full disk, one line is printed to stderr and training continues.
    """

    def __init__(self, loggers: Sequence[RunLogger]) -> None:
        self._loggers = loggers
        self._failed: set[int] = set()

    def message(self, message: str) -> None:
        """Log a line of text; control characters from file and class names are escaped."""
        self._each("message", printable(as_typed(message)))

    def _each(self, method: str, *values: Any) -> None:
        for number, logger in enumerate(self._loggers):
            try:
                getattr(logger, method)(*values)
            except OSError as error:
                if number not in self._failed:
                    self._failed.add(number)
                    warn_cannot_write(type(logger).__name__, error)


for _method in ("event", "images", "steps", "epoch", "end", "delivered", "close"):
    setattr(Loggers, _method, partialmethod(Loggers._each, _method))


def warn_cannot_write(name: str, error: OSError) -> None:
    """Print that a destination of the run's numbers can no longer be written to."""
    print(f"{name} cannot write ({error}): training continues without it", file=sys.stderr, flush=True)
