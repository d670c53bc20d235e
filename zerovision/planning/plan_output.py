"""Prints the plan of scripts/plan.py, with its reason and the command to type."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

from rich.console import Console
from rich.table import Table

from zerovision.planning.recommend import MESH, reason
from zerovision.planning.search import Option, PlannedJob, filling_batch, options
from zerovision.training.base.units import format_bytes, format_duration, plural
from zerovision.training.config import TrainConfig
from zerovision.training.config.values import changed_flags, launch_command
from zerovision.training.out_of_memory import Rung

WIDTH = 160  # of a table, if it is not printed to a wide terminal
ERROR = "predictions were within 6 % on CPU ranks, and not compared on GPUs"  # docs/dev/memory.md
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
    """Print the chosen option and the others.

    Args:
        job: the job that is planned.
        chosen: the recommended option.
        rungs: the rungs that lead to it.
        assumed: the assumptions for missing values.
        step_s: seconds that a step of the chosen micro-batch took on this machine; None if not measured.
        as_json: whether to print JSON instead of text.
    """
    words = chosen.config
    can_fill = job.has_gpus and words.ranks_per_replica == words.ranks_per_layer  # stages have memories of their own
    filled = filling_batch(job, chosen) if can_fill else None
    content = _described(job, options(job), filled)
    best = content["recommended"] = _of_option(job, chosen) | {
        "reason": reason(job, chosen, rungs),
        "changed_flags": changed_flags(chosen.config, job.config),
        "command": command_of(job, chosen),
    }
    if step_s:
        content["measured_step_s"] = step_s
    if as_json:
        print(json.dumps(content, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    console.print(_table(content))
    per = "per GPU" if words.ranks_per_replica == 1 else f"per {words.ranks_per_replica} GPUs"
    console.print(
        f"{plural(words.micro_batch, 'image')} of {job.image_size} pixels {per} x "
        f"{words.gradient_accumulation_steps} x {chosen.plan.shards * chosen.plan.replicas}, {job.precision}; "
        f"{assumed or f'{job.images:,} images, {job.classes:,} classes'}."
    )
    if step_s:
        speed = f"{words.micro_batch / step_s:,.0f} images/s"
        console.print(f"measured     {format_duration(step_s)} per step of one process on this machine, {speed}")
    console.print(f"recommended  {best['strategy']}, engine {best['engine']}: {best['reason']}.")
    if filled is not None:
        console.print(f"fills a GPU  {describe_filling(job, chosen, filled)}")
    console.print(f"error so far {ERROR}")
    console.print(f"type         {shlex.join(best['command'])}")


def what_the_rate_does(config: TrainConfig, global_batch: int) -> str:
    """Return what happens to the learning rate if the global batch grows."""
    if config.learning_rate == "auto":
        return "--learning-rate auto finds one for it"
    if config.base_batch_size:
        return f"the learning rate grows with it (--base-batch-size {config.base_batch_size})"
    return f"the learning rate stays {config.learning_rate:g}, unless --base-batch-size {global_batch} scales it"


def describe_filling(job: PlannedJob, chosen: Option, filled: Option) -> str:
    """Return how many images fill a GPU, their memory, and the effect on global batch and learning rate."""
    need = f"{format_bytes(filled.memory.peak)} of {format_bytes(job.machine.gpu.memory_bytes)}"
    if filled is chosen:
        return f"--batch-size {chosen.config.micro_batch} does, with {need}"
    before, now = chosen.images_per_update, filled.images_per_update
    rate = f"; {what_the_rate_does(job.config, before)}" if now > before else ""
    return (
        f"--batch-size {filled.config.micro_batch} needs {need}: the global batch is then {now:,} images instead of "
        f"{before:,}{rate}"
    )


def _table(content: dict[str, Any]) -> Table:
    """Tabulate the options, with the recommended one if it is not among them."""
    each = f"{content['gpu_memory_bytes'] / 1e9:.1f} GB each"
    table = Table(title=f"{content['model_type']} on {content['ranks']} x {content['gpu']}, {each}: GB per GPU")
    for heading in ("strategy, engine", *PARTS, "needs", "fits"):
        table.add_column(heading, justify="left" if heading.startswith("strategy") else "right", no_wrap=True)
    rows, best = content["options"], content["recommended"]
    found = next((row for row in rows if best == best | row), best)
    for row in rows if found in rows else [*rows, found]:
        mesh = [f", {flag.partition('_')[0]} {row[flag]}" for flag in MESH if row[flag] > 1]
        name = "".join([f"{row['strategy']}, {row['engine']}", *mesh, " *" if row is found else ""])
        parts = [sum(row["memory_bytes"][part] for part in names) for names in PARTS.values()]
        cells = [f"{part / 1e9:.2f}" for part in (*parts, row["peak_bytes"])]
        table.add_row(name, *cells, "yes" if row["fits"] else "no")
    return table


def command_of(job: PlannedJob, chosen: Option) -> list[str]:
    """Return the launcher command for an option."""
    return launch_command(chosen.config, job.ranks, min(job.machine.ranks, job.ranks))


def _of_option(job: PlannedJob, option: Option) -> dict[str, Any]:
    sizes = ("batch_size", "gradient_accumulation_steps", *MESH)
    settings = ("strategy", *sizes, "activation_checkpointing", "offload")
    return {
        **{name: getattr(option.config, name) for name in settings},
        "engine": option.engine,
        "fits": option.fits,
        "peak_bytes": option.memory.peak,
        "memory_bytes": dataclasses.asdict(option.memory),
        "host_bytes_per_machine": job.host_bytes(option),
    }


def _described(job: PlannedJob, rows: list[Option], filled: Option | None) -> dict[str, Any]:
    return {
        "model_type": job.config.model_type,
        "gpu": job.machine.gpu.name,
        "gpu_memory_bytes": job.machine.gpu.memory_bytes,
        "ranks": job.ranks,
        "image_size": job.image_size,
        "images": job.images,
        "precision": job.precision,
        "batch_size": job.config.batch_size,
        "options": [_of_option(job, option) for option in rows],
        "fills_a_gpu": _of_option(job, filled) if filled else None,
        "error": ERROR,
    }
