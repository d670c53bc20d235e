"""`plan.py --scale 8..4096`: the training on more and more GPUs as a table with a bar for each, or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from planning.scaling import RESTART_S, ScaleJob, ScalePoint, scale, verdict
from planning.search import PlannedJob, recommend
from planning.step_time import predict_step
from training.config import TrainConfig
from training.observe.units import format_digits, format_duration
from training.parallel.strategies import plan_of

WIDTH = 140  # of the table, if it is not printed to a wide terminal
BAR = 20  # characters for an efficiency of 1
OF_TIME = ("step", "epoch", "GPU-hours", "failures", "save every", "lost")
HEADINGS = ("GPUs", "images/s", "efficiency", "", "global batch", *OF_TIME)


def run_scale(job: PlannedJob, counts: Sequence[int], failures_per_gpu_day: float, *, as_json: bool) -> int:
    """Print what is expected of each number of GPUs, and up to where more pay; return the exit code.

    Raises:
        UserError: if the training fits nowhere.
    """
    scaled = scale_job(job, failures_per_gpu_day)
    points = scale(scaled, counts)
    batch = what_the_batch_does(job.config, scaled, points)
    if as_json:
        content = {"engine": scaled.engine, "strategy": scaled.strategy, "verdict": verdict(points), "batch": batch}
        print(json.dumps(content | {"points": [dataclasses.asdict(point) for point in points]}, indent=2))
        return 0
    machine = job.machine
    links = f"{machine.ranks} per machine over {machine.inside.name}, {machine.between.name} between them"
    table = Table(title=f"{job.config.model_type} on {machine.gpu.name}, {links}", box=None)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for point in points:
        table.add_row(*cells(point))
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    console.print(table)
    console.print(
        f"{scaled.strategy}, engine {scaled.engine}; {scaled.batch_size} images per GPU x {scaled.accumulation_steps}; "
        f"GPU-hours of an epoch; {format_digits(failures_per_gpu_day)} failures per GPU and day, each of which costs "
        f"{RESTART_S:.0f} s and the work since the last save. No GPU has confirmed these predictions yet."
    )
    console.print(f"{batch}.")
    console.print(verdict(points))
    return 0


def scale_job(job: PlannedJob, failures_per_gpu_day: float) -> ScaleJob:
    """Return the recommended way to run the job, with the predicted seconds of a rank alone."""
    chosen, _ = recommend(job)
    config, workload = chosen.config, job.workload
    micro_steps = config.gradient_accumulation_steps
    alone = predict_step(
        workload.operators,
        workload.sizes.trained,
        job.machine,
        plan_of(config.strategy, 1),
        engine=chosen.engine,
        batch_size=config.micro_batch,
        precision=job.precision,
        accumulation_steps=micro_steps,
        checkpointing=config.activation_checkpointing,
        blocks=workload.blocks,
    )
    return ScaleJob(
        engine=chosen.engine,
        strategy=config.strategy,
        parameters=workload.sizes.trained,
        machine=job.machine,
        batch_size=config.micro_batch,
        forward_s=alone.forward_s / micro_steps,
        backward_s=alone.backward_s / micro_steps,
        update_s=alone.update_s,
        images=job.images,
        accumulation_steps=micro_steps,
        blocks=workload.blocks,
        failures_per_gpu_day=failures_per_gpu_day,
    )


def what_the_batch_does(config: TrainConfig, job: ScaleJob, points: Sequence[ScalePoint]) -> str:
    """Return what becomes of the global batch and the learning rate as there are more GPUs."""
    first, last = points[0].global_batch, points[-1].global_batch
    if first == last:
        return f"the global batch is {first:,} images"
    each = f"each GPU keeps its {job.batch_size} images x {job.accumulation_steps}"
    return f"{each}, so the global batch grows from {first:,} to {last:,}; {what_the_rate_does(config, first)}"


def what_the_rate_does(config: TrainConfig, global_batch: int) -> str:
    """Return what becomes of the learning rate if this global batch grows."""
    if config.learning_rate == "auto":
        return "--learning-rate auto suggests one for it"
    if config.base_batch_size:
        return f"the learning rate grows with it (--base-batch-size {config.base_batch_size})"
    return f"the learning rate stays {config.learning_rate:g}, unless --base-batch-size {global_batch} scales it"


def cells(point: ScalePoint) -> list[str]:
    """Return the cells of a row."""
    return [
        f"{point.ranks}",
        f"{point.images_per_s:,.0f}",
        f"{point.efficiency:.1%}",
        "█" * round(BAR * point.efficiency),
        f"{point.global_batch:,}",
        format_duration(point.step_s),
        format_duration(point.epoch_s),
        format_digits(point.gpu_hours_per_epoch),
        f"{format_digits(point.failures_per_day)} a day",
        format_duration(point.save_every_s),
        f"{point.lost_share:.2%}",
    ]
