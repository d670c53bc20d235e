"""The command line of scripts/plan.py: turns training flags into a plan, and prints the plan with its reason."""

from __future__ import annotations

import dataclasses
import json
import shlex
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from zerovision.models import ImageSize, sides
from zerovision.planning.machines import GPUS_PER_NODE, Machine, PlanSettings, detect_machine, find_gpu
from zerovision.planning.recommend import MESH, reason, recommend
from zerovision.planning.run_workload import build_network, optimizer_of
from zerovision.planning.search import Option, PlannedJob, filling_batch, options, with_planned_batch
from zerovision.training.base.control_groups import limit_threads
from zerovision.training.base.errors import UserError, one_line
from zerovision.training.base.units import format_bytes, format_duration, plural
from zerovision.training.config import TrainConfig
from zerovision.training.config.global_batch import divide_given
from zerovision.training.config.values import changed_flags, launch_command
from zerovision.training.data import data_options, load_data
from zerovision.training.engines.precision import under_autocast
from zerovision.training.out_of_memory import Rung, is_out_of_memory
from zerovision.training.world.launchers import data_ranks

WIDTH = 160  # minimum width of a table, in characters
ERROR = "predictions were within 6 % on CPU ranks, and not compared on GPUs"  # docs/dev/memory.md
# Columns of the plan's table, and the parts of `MemoryPlan` that each column adds up.
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
    """Print the chosen option, the other options, what was `assumed`, and how long a measured step took, if any."""
    words = chosen.config
    can_fill = job.has_gpus and words.ranks_per_replica == words.ranks_per_layer  # stages differ in memory
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
    """Return a phrase that says what happens to the learning rate if the global batch grows."""
    if config.learning_rate == "auto":
        return "--learning-rate auto finds one for it"
    if config.base_batch_size:
        return f"the learning rate grows with it (--learning-rate RATE:{config.base_batch_size})"
    return f"the learning rate stays {config.learning_rate:g}, unless --learning-rate RATE:{global_batch} scales it"


def describe_filling(job: PlannedJob, chosen: Option, filled: Option) -> str:
    """Describe how many images fill a GPU, their memory, and their effect on the global batch and the learning rate."""
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
    """Return a table of the options; the recommended option is added if it is missing."""
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


# The data set to plan for without --data.
IMAGENET: dict[str, Any] = {"classes": 1000, "image_size": 224, "images": 1_281_167}
STEPS, WARM_UP_STEPS = 20, 5  # timed steps, and steps before them


def job_of(given: PlanSettings) -> tuple[PlannedJob, str]:
    """Return the job that the settings describe, and the assumptions for missing values.

    Raises:
        UserError: for anything that cannot be planned.
    """
    if given.gpu_memory and given.gpu:
        raise UserError("--gpu and --gpu-memory cannot be combined: leave one out.")
    gpu = f"{given.gpu_memory:.3f}gb" if given.gpu_memory else given.gpu
    if given.measure and gpu:
        raise UserError("--measure trains on this machine: leave --gpu out.")
    ranks = given.num_gpus
    per_node = given.gpus_per_node or min(ranks, GPUS_PER_NODE)
    fewer, more = ranks // per_node * per_node, -(-ranks // per_node) * per_node
    if fewer not in (0, more):
        raise UserError(
            f"--num-gpus {ranks} is not a multiple of the {per_node} GPUs per machine: use {fewer} or {more}, or "
            "set --gpus-per-node."
        )
    config = given.config()
    if config.global_batch and config.batch_size != "auto":
        config = dataclasses.replace(divide_given(config, data_ranks(ranks, config.mesh)), global_batch=0)
    machine = Machine(find_gpu(gpu), per_node) if gpu else detect_machine(per_node)
    has_data = given.with_data or any(word.partition("=")[0] == "--data" for word in given.training_words)
    data = _data(config) if has_data else IMAGENET | {"image_size": config.image_size or IMAGENET["image_size"]}
    data |= {name: number for name in ("images", "classes") if (number := getattr(given, name))}
    config = dataclasses.replace(config, image_channels=data.pop("image_channels", config.image_channels))
    job = with_planned_batch(PlannedJob(config, machine, ranks, **data))
    assumed = f"no --data: {job.images:,} images of {job.classes:,} classes at {job.image_size} pixels"
    return job, "" if has_data else assumed


def plan(given: PlanSettings) -> int:
    """Print the plan and return the exit code, or raise a UserError, also if the job does not fit anywhere."""
    job, assumed = job_of(given)
    chosen, rungs = recommend(job)
    step_s = None
    if given.measure:
        config: Any = {"batch_size": chosen.config.micro_batch, "precision": job.precision}
        try:
            step_s = measured_s(dataclasses.replace(job.config, **config), job.classes, job.image_size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"--measure: a step of {plural(chosen.config.micro_batch, 'image')} in one process ran out of this "
                f"machine's memory ({one_line(error, 160) or 'MemoryError'}): use a smaller --batch-size."
            ) from None
    print_plan(job, chosen, rungs, assumed, step_s, as_json=given.json)
    return 0


def measured_s(config: TrainConfig, classes: int, image_size: ImageSize) -> float:
    """Return the median seconds of a step (forward, backward, update) on random images, on the first GPU or the CPU."""
    limit_threads()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = build_network(config, classes, image_size).to(device).to(memory_format=torch.channels_last)
    optimizer = optimizer_of(network, config)
    forward = under_autocast(network, config.precision, device)  # a resolved precision; the loss is not scaled
    images = torch.rand(config.micro_batch, config.image_channels or 3, *sides(image_size), device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    seconds = []
    for _ in range(WARM_UP_STEPS + STEPS):
        start = time.perf_counter()
        forward(images).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP_STEPS:])


def _data(config: TrainConfig) -> dict[str, Any]:
    """Return the numbers of classes and images, and the images' size and channels."""
    data = load_data(data_options(config))
    channels = config.image_channels if data.preprocessing.channels == 3 else data.preprocessing.channels
    counts = {"classes": len(data.class_names), "images": sum(data.train_counts), "image_size": data.train.sizes[-1]}
    return counts | {"image_channels": channels}
