"""What scripts/plan.py prints: a plan with its reason and the command to type, or what more GPUs bring."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from zerovision.planning.machines import GPUS
from zerovision.planning.search import Option, PlannedJob, filling_batch, options, reason, step_of
from zerovision.training.base.units import format_bytes, format_digits, format_duration, plural
from zerovision.training.config import TrainConfig
from zerovision.training.config.values import changed_flags, launch_command
from zerovision.training.out_of_memory import Rung

WIDTH = 160  # of a table, if it is not printed to a wide terminal
# How far off predictions were: docs/memory.md, docs/scaling.md.
MEMORY_ERROR = "memory was within 6 % on CPU ranks and is not compared on GPUs"
TIME_ERROR = "time is an estimate, often half or twice as long; --measure takes a step of this machine"
# Columns of the plan's table: what they add up.
PARTS = {
    "parameters": ("weights", "buffers"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "buckets": ("communication",),
    "workspace": ("workspace", "overhead"),
}


def print_plan(
    job: PlannedJob, chosen: Option, rungs: list[Rung], meshes: list[Option], assumed: str, *, as_json: bool
) -> None:
    """Print the chosen option beside the others.

    Args:
        job: that is planned.
        chosen: what is recommended.
        rungs: that lead to it.
        meshes: further options.
        assumed: what was not given, and what was taken instead.
        as_json: instead of text.
    """
    why, rows, command = reason(job, chosen, rungs), [*options(job), *meshes], command_of(job, chosen)
    filled = filling_batch(job, chosen) if job.has_gpus and chosen.plan.pipeline_parallel == 1 else None
    if as_json:
        print(json.dumps(_as_json(job, chosen, why, rows, command, filled), indent=2))
        return
    console = _console()
    console.print(_table(job, rows if chosen in rows else [*rows, chosen], chosen))
    words = chosen.config
    per = "per GPU" if words.ranks_per_replica == 1 else f"per {words.ranks_per_replica} GPUs"
    console.print(
        f"{plural(words.micro_batch, 'image')} of {job.image_size} pixels {per} x "
        f"{words.gradient_accumulation_steps} x {chosen.plan.shards * chosen.plan.replicas}, {job.precision}; "
        f"{assumed or f'{job.images:,} images, {job.classes:,} classes'}."
    )
    hours = chosen.hours(job.images)
    console.print(
        f"time         {plural(words.epochs, 'epoch')}: about {format_duration(3600 * hours)} without evaluation, "
        f"{format_digits(job.ranks * hours)} GPU-hours"
    )
    if job.has_gpus and job.machine.gpu.name not in GPUS:
        console.print(f"GPU          {job.machine.gpu.name}: known {job.machine.gpu.source}")
    if job.ranks > 1:
        console.print(f"exchange     {'; '.join(links(job))}")
    console.print(f"recommended  {chosen.config.strategy}, engine {chosen.engine}: {why}.")
    if filled is not None:
        console.print(f"fills a GPU  {describe_filling(job, chosen, filled)}")
    console.print(f"error so far {'; '.join(errors(job))}")
    console.print(f"type         {shlex.join(command)}")


def print_scale(job: PlannedJob, chosen: Option, counts: Sequence[int], *, as_json: bool) -> None:
    """Print what is estimated of each number of GPUs, each of which keeps its batch."""
    config, rows = chosen.config, list[dict[str, Any]]()
    alone = step_of(job, config, job.plan_for(config, config.ranks_per_replica))
    for ranks in counts:
        step = step_of(job, config, job.plan_for(config, ranks))
        global_batch = ranks // config.ranks_per_replica * config.micro_batch * config.gradient_accumulation_steps
        epoch_s = math.ceil(job.images / global_batch) * step.step_s
        rows.append(
            {
                "ranks": ranks,
                "images_per_s": global_batch / step.step_s,
                "efficiency": alone.step_s / step.step_s,
                "global_batch": global_batch,
                "step_s": step.step_s,
                "epoch_s": epoch_s,
                "gpu_hours_per_epoch": ranks * epoch_s / 3600,
            }
        )
    batch = what_the_batch_does(config, rows[0]["global_batch"], rows[-1]["global_batch"])
    if as_json:
        content = {"engine": chosen.engine, "strategy": config.strategy, "batch": batch, "error": errors(job)[-1]}
        print(json.dumps(content | {"points": rows}, indent=2))
        return
    machine = job.machine
    links_used = f"{machine.ranks} per machine over {machine.inside.name}, {machine.between.name} between them"
    table = Table(title=f"{config.model_type} on {machine.gpu.name}, {links_used}", box=None)
    for heading in ("GPUs", "images/s", "efficiency", "global batch", "step", "epoch", "GPU-hours"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        counted = (f"{row['images_per_s']:,.0f}", f"{row['efficiency']:.1%}", f"{row['global_batch']:,}")
        times = (format_duration(row["step_s"]), format_duration(row["epoch_s"]))
        table.add_row(f"{row['ranks']}", *counted, *times, format_digits(row["gpu_hours_per_epoch"]))
    console = _console()
    console.print(table)
    console.print(f"{config.strategy}, {batch}; failures, slow GPUs and waits for images are not counted.")
    console.print(f"error so far {errors(job)[-1]}")


def errors(job: PlannedJob) -> list[str]:
    """Return how far memory and time of such plans were off."""
    measured = "time is that of a step measured here, and of an estimated exchange"
    return [MEMORY_ERROR, TIME_ERROR if job.compute_scale == 1 else measured]


def what_the_batch_does(config: TrainConfig, first: int, last: int) -> str:
    """Return what becomes of the global batch and the learning rate as there are more GPUs."""
    if first == last:
        return f"the global batch is {first:,} images"
    each = f"each GPU keeps its {plural(config.micro_batch, 'image')} x {config.gradient_accumulation_steps}"
    return f"{each}, so the global batch grows from {first:,} to {last:,}; {what_the_rate_does(config, first)}"


def what_the_rate_does(config: TrainConfig, global_batch: int) -> str:
    """Return what becomes of the learning rate if this global batch grows."""
    if config.learning_rate == "auto":
        return "--learning-rate auto suggests one for it"
    if config.base_batch_size:
        return f"the learning rate grows with it (--base-batch-size {config.base_batch_size})"
    return f"the learning rate stays {config.learning_rate:g}, unless --base-batch-size {global_batch} scales it"


def describe_filling(job: PlannedJob, chosen: Option, filled: Option) -> str:
    """Return how many images fill a GPU, what they need, and what becomes of speed, global batch and learning rate."""
    need = f"{format_bytes(filled.memory.peak)} of {format_bytes(job.machine.gpu.memory_bytes)}"
    if filled is chosen:
        return f"--batch-size {chosen.config.micro_batch} does, with {need}"
    before, now = chosen.images_per_update, filled.images_per_update
    rate = f"; {what_the_rate_does(job.config, before)}" if now > before else ""
    speed = f"{filled.images_per_s:,.0f} images/s, {format_duration(3600 * filled.hours(job.images))}"
    return (
        f"--batch-size {filled.config.micro_batch} needs {need}: {speed}; the global batch is then {now:,} images "
        f"instead of {before:,}{rate}"
    )


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    return console


def _table(job: PlannedJob, rows: list[Option], chosen: Option) -> Table:
    gpu = job.machine.gpu
    each = f"{gpu.memory_bytes / 1e9:.1f} GB each"
    table = Table(title=f"{job.config.model_type} on {job.ranks} x {gpu.name}, {each}: GB per GPU")
    for heading in ("strategy, engine", *PARTS, "needs", "fits", "step", "images/s", "exchange", "time"):
        table.add_column(heading, justify="left" if heading.startswith("strategy") else "right", no_wrap=True)
    for option in rows:
        mesh = [
            f", {kind} {size}"
            for kind in ("tensor", "pipeline")
            if (size := getattr(option.config, f"{kind}_parallel")) > 1
        ]
        name = "".join([f"{option.config.strategy}, {option.engine}", *mesh, " *" if option == chosen else ""])
        cells = [f"{part / 1e9:.2f}" for part in (*parts(option), option.memory.peak)]
        step = option.step
        share = f"{step.exchange_s / step.step_s:.0%}"
        time = format_duration(3600 * option.hours(job.images))
        speed = (format_duration(step.step_s), f"{option.images_per_s:,.0f}", share, time)
        table.add_row(name, *cells, "yes" if option.fits else "no", *speed)
    return table


def parts(option: Option) -> list[int]:
    """Return an option's memory by the parts of the table, in bytes."""
    return [sum(getattr(option.memory, name) for name in names) for names in PARTS.values()]


def links(job: PlannedJob) -> list[str]:
    """Return the links that the ranks of a job exchange over, with what is taken of them and from where."""
    machine = job.machine
    used = {"in a machine": machine.inside} if min(machine.ranks, job.ranks) > 1 else {}
    used |= {"between machines": machine.between} if job.ranks > machine.ranks else {}
    return [
        f"{where} {link.name}, {link.rate / 1e9:.3g} GB/s and {1e6 * link.latency_s:.3g} µs a hop ({link.source})"
        for where, link in used.items()
    ]


def command_of(job: PlannedJob, chosen: Option) -> list[str]:
    """Return the launcher's command line of an option."""
    return launch_command(chosen.config, job.ranks, min(job.machine.ranks, job.ranks))


def _as_json(
    job: PlannedJob, chosen: Option, why: str, rows: list[Option], command: list[str], filled: Option | None
) -> dict[str, Any]:
    def described(option: Option) -> dict[str, Any]:
        sizes = ("batch_size", "gradient_accumulation_steps", "tensor_parallel", "pipeline_parallel")
        settings = ("strategy", *sizes, "activation_checkpointing", "offload")
        return {
            **{name: getattr(option.config, name) for name in settings},
            "engine": option.engine,
            "fits": option.fits,
            "peak_bytes": option.memory.peak,
            "memory_bytes": dataclasses.asdict(option.memory),
            "host_bytes_per_machine": job.host_bytes(option),
            "step_s": option.step.step_s,
            "exchange_s": option.step.exchange_s,
            "images_per_s": option.images_per_s,
            "hours": option.hours(job.images),
        }

    return {
        "model_type": job.config.model_type,
        "gpu": job.machine.gpu.name,
        "gpu_memory_bytes": job.machine.gpu.memory_bytes,
        "ranks": job.ranks,
        "image_size": job.image_size,
        "images": job.images,
        "precision": job.precision,
        "links": links(job),
        "compute_scale": job.compute_scale,
        "batch_size": job.config.batch_size,
        "options": [described(option) for option in rows],
        "fills_a_gpu": described(filled) if filled else None,
        "errors": errors(job),
        "recommended": described(chosen)
        | {"reason": why}
        | {"changed_flags": changed_flags(chosen.config, job.config), "command": command},
    }
