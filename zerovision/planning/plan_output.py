"""What scripts/plan.py prints: a plan with its reason and the command to type."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

from rich.console import Console
from rich.table import Table

from zerovision.planning.recommend import reason
from zerovision.planning.search import Option, PlannedJob, filling_batch, options
from zerovision.training.base.units import format_bytes, format_duration, plural
from zerovision.training.config import TrainConfig
from zerovision.training.config.values import changed_flags, launch_command
from zerovision.training.out_of_memory import Rung

WIDTH = 160  # of a table, if it is not printed to a wide terminal
ERROR = "memory was within 6 % on CPU ranks and is not compared on GPUs"  # docs/memory.md
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
    job: PlannedJob, chosen: Option, rungs: list[Rung], assumed: str, step_s: float | None, *, as_json: bool
) -> None:
    """Print the chosen option beside the others.

    Args:
        job: that is planned.
        chosen: what is recommended.
        rungs: that lead to it.
        assumed: what was not given, and what was taken instead.
        step_s: that a step of the chosen micro-batch took on this machine; None if it was not measured.
        as_json: instead of text.
    """
    why, rows, command = reason(job, chosen, rungs), options(job), command_of(job, chosen)
    filled = filling_batch(job, chosen) if job.has_gpus and chosen.plan.pipeline_parallel == 1 else None
    if as_json:
        content = _as_json(job, chosen, why, rows, command, filled) | ({"measured_step_s": step_s} if step_s else {})
        print(json.dumps(content, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    console.print(_table(job, rows if chosen in rows else [*rows, chosen], chosen))
    words = chosen.config
    per = "per GPU" if words.ranks_per_replica == 1 else f"per {words.ranks_per_replica} GPUs"
    console.print(
        f"{plural(words.micro_batch, 'image')} of {job.image_size} pixels {per} x "
        f"{words.gradient_accumulation_steps} x {chosen.plan.shards * chosen.plan.replicas}, {job.precision}; "
        f"{assumed or f'{job.images:,} images, {job.classes:,} classes'}."
    )
    if step_s:
        speed = f"{words.micro_batch / step_s:,.0f} images/s"
        console.print(f"measured     {format_duration(step_s)} a step of one process on this machine, {speed}")
    console.print(f"recommended  {chosen.config.strategy}, engine {chosen.engine}: {why}.")
    if filled is not None:
        console.print(f"fills a GPU  {describe_filling(job, chosen, filled)}")
    console.print(f"error so far {ERROR}")
    console.print(f"type         {shlex.join(command)}")


def what_the_rate_does(config: TrainConfig, global_batch: int) -> str:
    """Return what becomes of the learning rate if this global batch grows."""
    if config.learning_rate == "auto":
        return "--learning-rate auto suggests one for it"
    if config.base_batch_size:
        return f"the learning rate grows with it (--base-batch-size {config.base_batch_size})"
    return f"the learning rate stays {config.learning_rate:g}, unless --base-batch-size {global_batch} scales it"


def describe_filling(job: PlannedJob, chosen: Option, filled: Option) -> str:
    """Return how many images fill a GPU, what they need, and what becomes of global batch and learning rate."""
    need = f"{format_bytes(filled.memory.peak)} of {format_bytes(job.machine.gpu.memory_bytes)}"
    if filled is chosen:
        return f"--batch-size {chosen.config.micro_batch} does, with {need}"
    before, now = chosen.images_per_update, filled.images_per_update
    rate = f"; {what_the_rate_does(job.config, before)}" if now > before else ""
    return (
        f"--batch-size {filled.config.micro_batch} needs {need}: the global batch is then {now:,} images instead of "
        f"{before:,}{rate}"
    )


def _table(job: PlannedJob, rows: list[Option], chosen: Option) -> Table:
    gpu = job.machine.gpu
    each = f"{gpu.memory_bytes / 1e9:.1f} GB each"
    table = Table(title=f"{job.config.model_type} on {job.ranks} x {gpu.name}, {each}: GB per GPU")
    for heading in ("strategy, engine", *PARTS, "needs", "fits"):
        table.add_column(heading, justify="left" if heading.startswith("strategy") else "right", no_wrap=True)
    for option in rows:
        mesh = [
            f", {kind} {size}"
            for kind in ("tensor", "pipeline")
            if (size := getattr(option.config, f"{kind}_parallel")) > 1
        ]
        name = "".join([f"{option.config.strategy}, {option.engine}", *mesh, " *" if option == chosen else ""])
        parts = [sum(getattr(option.memory, part) for part in names) for names in PARTS.values()]
        cells = [f"{part / 1e9:.2f}" for part in (*parts, option.memory.peak)]
        table.add_row(name, *cells, "yes" if option.fits else "no")
    return table


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
        }

    return {
        "model_type": job.config.model_type,
        "gpu": job.machine.gpu.name,
        "gpu_memory_bytes": job.machine.gpu.memory_bytes,
        "ranks": job.ranks,
        "image_size": job.image_size,
        "images": job.images,
        "precision": job.precision,
        "batch_size": job.config.batch_size,
        "options": [described(option) for option in rows],
        "fills_a_gpu": described(filled) if filled else None,
        "error": ERROR,
        "recommended": described(chosen)
        | {"reason": why}
        | {"changed_flags": changed_flags(chosen.config, job.config), "command": command},
    }
