"""Where a run's numbers go: console, JSON lines, the text log and TensorBoard, behind one small Protocol.

A new logger is one class with these methods and one line in `build_loggers`. Only rank 0 builds any.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from training.errors import printable
from training.observe.units import format_bytes, format_duration

if TYPE_CHECKING:
    import torch

    from training.config import TrainConfig
    from training.observe.run_folder import RunFolder
    from training.observe.scores import Scores


class MemoryUse(NamedTuple):
    """Memory of rank 0.

    Attributes:
        memory_bytes: the peak: of what tensors took on a GPU, or resident on a CPU.
        memory_allocated_bytes: what tensors take on a GPU now, or what is resident on a CPU now.
        memory_reserved_bytes: what PyTorch has taken from a GPU, None on a CPU.
    """

    memory_bytes: int
    memory_allocated_bytes: int
    memory_reserved_bytes: int | None


class DeviceLoad(NamedTuple):
    """How hard a device works; None where it is not known.

    Attributes:
        tflops_per_second: 10**12 operations of the model per second and rank.
        mfu: these as a share of the device's 16-bit peak: model FLOPs utilization as in PaLM (arXiv 2204.02311,
            appendix B), whatever the precision trained in.
        gpu_utilization: share of the latest moments in which any kernel ran, by NVML.
    """

    tflops_per_second: float | None = None
    mfu: float | None = None
    gpu_utilization: float | None = None


@dataclasses.dataclass(frozen=True)
class StepPoint:
    """What is known at a logging point, over all ranks and the steps since the last one.

    Attributes:
        time_shares: of each span, the mean over the ranks.
        data_wait_share: that of the data.
    """

    epoch: int
    step: int
    steps_per_epoch: int
    total_steps: int
    loss: float
    learning_rate: float
    images_per_second: float
    data_wait_share: float
    seconds_left: float
    gradient_norm: float
    skipped_steps: int
    time_shares: Mapping[str, float]
    memory: MemoryUse
    load: DeviceLoad


@dataclasses.dataclass(frozen=True)
class EpochPoint:
    """What is known at the end of an epoch.

    `data_wait_share` is as in its logging points, on average; `diverged` is why it counts as diverged, None if not.
    """

    epoch: int
    step: int
    epochs: int
    train_loss: float
    train_top1: float
    validation: Scores
    images_per_second: float
    data_wait_share: float
    seconds: float
    evaluation_seconds: float
    memory_bytes_per_rank: Sequence[int]
    is_best: bool
    diverged: str | None
    class_names: Sequence[str]


@dataclasses.dataclass(frozen=True)
class RunPoint:
    """What is known at the end of a run, over all its steps since this process was started.

    Attributes:
        memory: of rank 0.
        memory_bytes_per_rank: the peak of every rank, as `MemoryUse.memory_bytes`.
    """

    step: int
    seconds: float
    evaluation_seconds: float
    images_per_second: float
    time_shares: Mapping[str, float]
    memory: MemoryUse
    load: DeviceLoad
    memory_bytes_per_rank: Sequence[int]


class RunLogger(Protocol):
    """One destination of a run's numbers."""

    def on_message(self, message: str) -> None:
        """Take a line of text for people."""

    def on_event(self, kind: str, values: dict[str, Any]) -> None:
        """Take something that happened (a checkpoint, a skipped step, a resume) as numbers for programs."""

    def on_images(self, images: torch.Tensor) -> None:
        """Take a sample of augmented training images, float32 [N, 3, H, W] in 0..1."""

    def on_steps(self, point: StepPoint) -> None:
        """Take a logging point."""

    def on_epoch(self, point: EpochPoint) -> None:
        """Take the end of an epoch."""

    def on_end(self, point: RunPoint) -> None:
        """Take the end of the run."""

    def close(self) -> None:
        """Flush and release files."""


class Loggers:
    """Hands everything to each logger in turn; on ranks other than 0 there are none.

    A logger that cannot write (a full disk) is told once on stderr, and training goes on.
    """

    def __init__(self, loggers: Sequence[RunLogger]) -> None:
        self._loggers = loggers
        self._complained: set[int] = set()

    def message(self, message: str) -> None:
        """Log a line of text; what a terminal would obey in it (names of files and classes) is escaped."""
        self._each("on_message", printable(message))

    def event(self, kind: str, values: dict[str, Any]) -> None:
        """Log something that happened, as numbers for programs."""
        self._each("on_event", kind, values)

    def images(self, images: torch.Tensor) -> None:
        """Log a sample of augmented training images, float32 [N, 3, H, W] in 0..1."""
        self._each("on_images", images)

    def steps(self, point: StepPoint) -> None:
        """Log a logging point."""
        self._each("on_steps", point)

    def epoch(self, point: EpochPoint) -> None:
        """Log the end of an epoch."""
        self._each("on_epoch", point)

    def end(self, point: RunPoint) -> None:
        """Log the end of the run."""
        self._each("on_end", point)

    def close(self) -> None:
        """Close every logger."""
        self._each("close")

    def _each(self, method: str, *values: Any) -> None:
        for number, logger in enumerate(self._loggers):
            try:
                getattr(logger, method)(*values)
            except OSError as error:
                if number not in self._complained:
                    self._complained.add(number)
                    name = type(logger).__name__
                    print(f"{name} cannot write ({error}): training goes on without it", file=sys.stderr, flush=True)


def open_loggers(
    config: TrainConfig, folder: RunFolder, facts: dict[str, Any], sharding: dict[str, Any], first_step: int
) -> Loggers:
    """Build rank 0's loggers and write the files that describe the run.

    Args:
        config: the run's configuration.
        folder: where the files go.
        facts: of `training.observe.environment.describe_run`.
        sharding: DeepSpeed's configuration of the run.
        first_step: see `build_loggers`.
    """
    from training.checkpoint.atomic_write import write_json
    from training.config import save_config

    loggers = build_loggers(config, folder, facts, first_step)
    try:
        save_config(config, folder.config)
        write_json(folder.environment, facts)
        write_json(folder.path / "deepspeed_config.json", sharding)
    except OSError as error:
        loggers.message(f"note: the run's description cannot be written: {error}")
    return loggers


def build_loggers(config: TrainConfig, folder: RunFolder, facts: dict[str, Any], first_step: int) -> Loggers:
    """Build rank 0's loggers.

    Args:
        config: the run's configuration.
        folder: where the files go.
        facts: the environment of the run, for TensorBoard's text page.
        first_step: the run's step that comes first, 0 but for a resume: later ones logged before it are void.
    """
    from training.observe.loggers.console import ConsoleLogger
    from training.observe.loggers.text_files import JsonLinesLogger, TextLogger

    loggers: list[RunLogger] = [TextLogger(folder), JsonLinesLogger(folder), ConsoleLogger(config.progress)]
    if config.tensorboard:
        from training.observe.loggers.tensorboard import TensorBoardLogger

        try:
            loggers.append(TensorBoardLogger(folder, dataclasses.asdict(config), facts, first_step))
        except OSError as error:
            print(f"TensorBoardLogger cannot write ({error}): training goes on without it", file=sys.stderr, flush=True)
    return Loggers(loggers)


def epoch_line(point: EpochPoint) -> str:
    """Return the one line that an epoch gets on the console and in the text log."""
    scores = point.validation
    mark = "  diverged" if point.diverged else "  best" if point.is_best else ""
    return (
        f"epoch {point.epoch}/{point.epochs}  train loss {point.train_loss:.4f}  val loss {scores.loss:.4f}  "
        f"top-1 {scores.top1:.4f}  top-5 {scores.top5:.4f}  {point.images_per_second:.0f} images/s  "
        f"{point.seconds:.1f} s{mark}"
    )


def step_line(point: StepPoint) -> str:
    """Return the plain line of a logging point."""
    skipped = f"  skipped {point.skipped_steps}" if point.skipped_steps else ""
    return (
        f"epoch {point.epoch}  step {point.step % point.steps_per_epoch or point.steps_per_epoch}"
        f"/{point.steps_per_epoch}  loss {point.loss:.4f}  lr {point.learning_rate:.3g}  "
        f"{point.images_per_second:.0f} images/s  data wait {point.data_wait_share:.1%}  "
        f"left {format_duration(point.seconds_left)}{skipped}"
    )


def run_lines(point: RunPoint) -> list[str]:
    """Return the lines of a run's end: its time, its speed and its memory."""
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in point.time_shares.items())
    speed = f"{point.images_per_second:.0f} images/s in {format_duration(point.seconds)}"
    speed += f", evaluation {format_duration(point.evaluation_seconds)} apart"
    if point.load.tflops_per_second is not None:
        speed += f", {point.load.tflops_per_second:.3g} TFLOP/s per rank"
    if point.load.mfu is not None:
        speed += f", MFU {100 * point.load.mfu:.1f} %"
    peak, now, reserved = point.memory
    memory = f"peak {format_bytes(peak)}, now {format_bytes(now)}"
    if reserved is not None:
        memory += f", reserved {format_bytes(reserved)}"
    return [
        f"time         {shares}",
        f"speed        {speed}; memory of rank 0: {memory}",
    ]


def flat(point: StepPoint | RunPoint) -> dict[str, Any]:
    """Return a point's numbers by name, those of memory and load among them."""
    values = {name: value for name, value in vars(point).items() if name not in ("memory", "load")}
    return values | point.memory._asdict() | point.load._asdict()
