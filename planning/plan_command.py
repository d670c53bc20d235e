"""The command line of scripts/plan.py: from a training's flags to a table, a recommendation, and what to type."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from planning.batch_memory import filling_batch, with_planned_batch
from planning.calibration import calibrate
from planning.failures import FAILURES_PER_GPU_DAY
from planning.ledger import this_machine
from planning.machines import GB, GPUS, SMALLEST_GB, find_machine
from planning.scale_command import run_scale, what_the_rate_does
from planning.scaling import read_counts
from planning.search import Option, PlannedJob, error_bars, options, reason, recommend
from training.command_line import OneLineParser, parse_args
from training.config import FIELDS, FLAG_OF, TrainConfig
from training.data import data_options, load_data
from training.errors import UserError, shown
from training.global_batch import nearest_multiples
from training.observe.units import format_bytes, format_digits, format_duration
from training.parallel.strategies import STRATEGIES

IMAGENET = {"classes": 1000, "image_size": 224, "images": 1_281_167}  # planned for if no --data is given
GPUS_PER_NODE, MOST_RANKS = 8, 65536
WIDTH = 160  # of the table, if it is not printed to a wide terminal
POSITIONAL = ("model_type", "strategy", "batch_size", "epochs")  # of a launcher
DEFAULTS = TrainConfig()
SUFFIXES = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What was asked for."""

    job: PlannedJob
    as_json: bool
    assumed: str
    """What was not given, and what was taken instead."""
    scale: Sequence[int] = ()
    """Numbers of GPUs to compare; none for a plan."""
    failures_per_gpu_day: float = FAILURES_PER_GPU_DAY


def parse(words: Sequence[str], description: str | None) -> PlanRequest:
    """Read the command line: the planner's own flags, and the trainer's.

    Raises:
        UserError: for whatever cannot be planned.
    """
    parser = OneLineParser("plan", description)
    parser.add_number("--num-gpus", 1, MOST_RANKS, default=1, help="GPUs (or CPU ranks) of the run (default: 1).")
    parser.add_number("--gpus-per-node", 1, 1024, help=f"GPUs of a machine (default: at most {GPUS_PER_NODE}).")
    gpus = ", ".join(GPUS)
    parser.add_argument("--gpu", metavar="NAME", help=f"{gpus}, or as 8gb any; default: this machine's, or its CPU.")
    parser.add_number("--gpu-memory", SMALLEST_GB, 9999.0, help="GB of each GPU, such as 8: of --gpu, or of any GPU.")
    parser.add_argument(
        "--interconnect", metavar="A+B", help="Links inside and between machines, such as nvlink4+ib400 or pcie4."
    )
    parser.add_argument(
        "--calibrate", metavar="FILE", help="Take the link from the all-reduce that `doctor.py --json` measured."
    )
    parser.add_choice("--strategy", [*STRATEGIES], default="ddp", help="Begin with this one (default: ddp).")
    parser.add_argument(
        "--images", metavar="N", help="Training images, such as 1.28M; default: of --data, or ImageNet."
    )
    parser.add_number("--classes", 2, 10**6, help="Classes; default: of --data, or 1000.")
    parser.add_argument("--with-data", action="store_true", help="Plan for --data's default too, not for ImageNet.")
    parser.add_argument("--scale", metavar="FIRST..LAST", help="Compare numbers of GPUs instead, such as 8..4096.")
    parser.add_number(
        "--failures-per-gpu-day", 0.0, 1.0, default=FAILURES_PER_GPU_DAY, help="For --scale; default: of Llama 3's run."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.epilog = "All flags of scripts/train_distributed.py are known too, such as --model-type and --batch-size."
    given, others = parser.parse_known(words)
    config, _ = parse_args([f"--strategy={given.strategy}", *others])
    counts = read_counts(given.scale) if given.scale is not None else []
    given.num_gpus = counts[0] if counts else given.num_gpus
    per_node = given.gpus_per_node or min(given.num_gpus, GPUS_PER_NODE)
    fewer, more = given.num_gpus // per_node * per_node, -(-given.num_gpus // per_node) * per_node
    if fewer not in (0, more):
        raise UserError(
            f"--num-gpus {given.num_gpus} is no multiple of {per_node} GPUs per machine: give {fewer} or {more}, or "
            "--gpus-per-node."
        )
    if config.global_batch and config.batch_size != "auto":
        config = _with_global_batch(config, given.num_gpus, config.global_batch)
    gpu = given.gpu or (f"{given.gpu_memory:.3f}gb" if given.gpu_memory else None)
    machine = find_machine(gpu, per_node, given.interconnect) if gpu else this_machine(per_node)
    if given.gpu_memory:
        sized = dataclasses.replace(machine.gpu, memory_bytes=int(given.gpu_memory * GB))
        machine = dataclasses.replace(machine, gpu=sized)
    machine = calibrate(machine, given.calibrate) if given.calibrate else machine
    has_data = given.with_data or any(word.partition("=")[0] == "--data" for word in others)
    data, assumed = _data(config, has_data=has_data)
    if given.images:
        data["images"] = _count(given.images)
    if given.classes:
        data["classes"] = given.classes
    config = dataclasses.replace(config, image_channels=data.pop("image_channels"))
    job = with_planned_batch(PlannedJob(config, machine, given.num_gpus, **data))
    return PlanRequest(job, given.json, assumed, counts, given.failures_per_gpu_day)


def _count(text: str) -> int:
    """Return a number such as 50000, 50k or 1.28M."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kMG]?)", text)
    if not match or not (count := round(float(match[1]) * SUFFIXES[match[2]])):
        raise UserError(f"--images {shown(text)}: expected a number of images, such as 50000, 50k or 1.28M.")
    return count


def _with_global_batch(config: TrainConfig, ranks: int, global_batch: int) -> TrainConfig:
    one = config.micro_batch * ranks
    if global_batch % one:
        raise UserError(
            f"--global-batch {global_batch} is no multiple of {config.micro_batch} images x {ranks} GPUs: "
            f"give {nearest_multiples(global_batch, one)}, or another --batch-size."
        )
    return dataclasses.replace(config, gradient_accumulation_steps=global_batch // one, global_batch=0)


def _data(config: TrainConfig, *, has_data: bool) -> tuple[dict[str, int], str]:
    """Return classes, images, their size and channels (those given, unless they are not 3), and what was assumed."""
    if not has_data:
        size = config.image_size or IMAGENET["image_size"]
        text = f"no --data: {IMAGENET['images']:,} images of {IMAGENET['classes']:,} classes at {size} pixels"
        return IMAGENET | {"image_size": size, "image_channels": config.image_channels}, text
    data = load_data(data_options(config))
    size = data.train.sizes[-1]
    counts = {"classes": len(data.class_names), "images": sum(data.train_counts), "image_size": size}
    return counts | {"image_channels": config.image_channels if data.image_channels == 3 else data.image_channels}, ""


def run(request: PlanRequest) -> int:
    """Print the plan; return the exit code.

    Raises:
        UserError: if the training fits nowhere.
    """
    job = request.job
    if request.scale:
        return run_scale(job, request.scale, request.failures_per_gpu_day, as_json=request.as_json)
    chosen, rungs = recommend(job)
    why = reason(job, chosen, rungs)
    rows = options(job)
    command = launch_command(job, chosen)
    filled = filling_batch(job, chosen) if job.has_gpus else None
    if request.as_json:
        print(json.dumps(_as_json(job, chosen, why, rows, command, filled), indent=2))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    console.print(_table(job, rows if chosen in rows else [*rows, chosen], chosen))
    words = chosen.config
    console.print(
        f"{words.batch_size} images of {job.image_size} pixels per GPU x {words.gradient_accumulation_steps} x "
        f"{job.ranks}, {job.precision}; {request.assumed or f'{job.images:,} images, {job.classes:,} classes'}."
    )
    hours = chosen.hours(job.images)
    console.print(
        f"time         {words.epochs} epochs: {format_duration(3600 * hours)} without evaluation, "
        f"{format_digits(job.ranks * hours)} GPU-hours"
    )
    if job.has_gpus and job.machine.gpu.name not in GPUS:
        console.print(f"GPU          {job.machine.gpu.name}: known {job.machine.gpu.source}")
    if job.ranks > 1:
        console.print(f"exchange     {'; '.join(links(job))}")
    console.print(f"recommended  {chosen.config.strategy}, engine {chosen.engine}: {why}.")
    if filled is not None:
        console.print(f"fills a GPU  {describe_filling(job, chosen, filled)}")
    console.print(f"error so far {'; '.join(error_bars(chosen, job.machine.gpu.name))}")
    console.print(f"type         {shlex.join(command)}")
    return 0


def describe_filling(job: PlannedJob, chosen: Option, filled: Option) -> str:
    """Return how many images fill a GPU, what they need, and what becomes of speed, global batch and learning rate."""
    need = f"{format_bytes(filled.memory.peak)} of {format_bytes(job.machine.gpu.memory_bytes)}"
    if filled is chosen:
        return f"these {chosen.config.micro_batch} images do, with {need}"
    before, now = chosen.images_per_update, filled.images_per_update
    rate = f"; {what_the_rate_does(job.config, before)}" if now > before else ""
    speed = f"{filled.images_per_s:,.0f} images/s, {format_duration(3600 * filled.hours(job.images))}"
    return (
        f"--batch-size {filled.config.micro_batch} needs {need}: {speed}; the global batch is then {now:,} images "
        f"instead of {before:,}{rate}"
    )


def _table(job: PlannedJob, rows: list[Option], chosen: Option) -> Table:
    gpu = job.machine.gpu
    each = f"{gpu.memory_bytes / 1e9:.1f} GB each"
    table = Table(title=f"{job.config.model_type} on {job.ranks} x {gpu.name}, {each}: GB per GPU")
    for heading in ("strategy, engine", *PARTS, "needs", "fits", "step", "images/s", "exchange", "time"):
        table.add_column(heading, justify="left" if heading.startswith("strategy") else "right", no_wrap=True)
    for option in rows:
        name = f"{option.config.strategy}, {option.engine}" + (" *" if option == chosen else "")
        cells = [f"{part / 1e9:.2f}" for part in (*parts(option), option.memory.peak)]
        step = option.step
        share = f"{step.exposed_communication_s / step.step_s:.0%}"
        time = format_duration(3600 * option.hours(job.images))
        speed = (format_duration(step.step_s), f"{option.images_per_s:,.0f}", share, time)
        table.add_row(name, *cells, "yes" if option.fits else "no", *speed)
    return table


# Columns of the table: what they add up.
PARTS = {
    "parameters": ("weights", "buffers"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "buckets": ("communication",),
    "workspace": ("workspace", "overhead"),
}


def parts(option: Option) -> list[int]:
    """Return an option's memory by the parts of the table, in bytes."""
    return [sum(getattr(option.memory, name) for name in names) for names in PARTS.values()]


def links(job: PlannedJob) -> list[str]:
    """Return the links that the ranks of a job exchange over, with what is taken of them and from where."""
    machine = job.machine
    used = {"in a machine": machine.inside} if min(machine.ranks, job.ranks) > 1 else {}
    used |= {"between machines": machine.between} if job.ranks > machine.ranks else {}
    return [
        f"{where} {link.name}, {link.bandwidth_bytes_per_s * link.achieved_share / 1e9:.3g} GB/s and "
        f"{1e6 * link.latency_s:.3g} µs a hop ({link.source})"
        for where, link in used.items()
    ]


def training_flags(config: TrainConfig, start: TrainConfig = DEFAULTS) -> list[str]:
    """Return the flags of what differs from another configuration, without a launcher's positional arguments."""
    changed = (name for name in FIELDS if getattr(config, name) != getattr(start, name))
    return [f"{FLAG_OF[name]}={_word(getattr(config, name))}" for name in changed if name not in POSITIONAL]


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def launch_command(job: PlannedJob, chosen: Option) -> list[str]:
    """Return the launcher's command line of an option."""
    config, per_node = chosen.config, min(job.machine.ranks, job.ranks)
    nodes = job.ranks // per_node
    script, where = "launch_distributed.sh", [job.ranks]
    if nodes > 1:
        script, where = "launch_multi_node.sh", [nodes, per_node]
    positional = [config.model_type, config.strategy, *where, config.micro_batch, config.epochs]
    return ["bash", f"scripts/{script}", *map(str, positional), *training_flags(config)]


def _as_json(
    job: PlannedJob, chosen: Option, why: str, rows: list[Option], command: list[str], filled: Option | None
) -> dict[str, Any]:
    def described(option: Option) -> dict[str, Any]:
        memory = {field.name: getattr(option.memory, field.name) for field in dataclasses.fields(option.memory)}
        settings = ("strategy", "batch_size", "gradient_accumulation_steps", "activation_checkpointing", "offload")
        return {
            **{name: getattr(option.config, name) for name in settings},
            "engine": option.engine,
            "fits": option.fits,
            "peak_bytes": option.memory.peak,
            "memory_bytes": memory,
            "host_bytes_per_machine": job.host_bytes(option),
            "step_s": option.step.step_s,
            "exposed_communication_s": option.step.exposed_communication_s,
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
        "batch_size": job.config.batch_size,
        "options": [described(option) for option in rows],
        "fills_a_gpu": described(filled) if filled else None,
        "recommended": described(chosen)
        | {"reason": why, "error_bars": error_bars(chosen, job.machine.gpu.name)}
        | {"changed_flags": training_flags(chosen.config, job.config), "command": command},
    }
