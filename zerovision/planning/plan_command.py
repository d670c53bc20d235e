"""The command line of scripts/plan.py: turns a training's flags into a plan, which `planning.plan_output` prints."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import torch

from zerovision.models.sides import ImageSize, sides
from zerovision.planning.flags import GPUS_PER_NODE, PlanFlags
from zerovision.planning.machines import Machine, detect_machine, find_gpu
from zerovision.planning.plan_output import print_plan
from zerovision.planning.recommend import recommend
from zerovision.planning.run_workload import build_network, optimizer_of
from zerovision.planning.search import PlannedJob, with_planned_batch
from zerovision.training.base.control_groups import limit_threads
from zerovision.training.base.errors import UserError, one_line
from zerovision.training.base.units import plural
from zerovision.training.config import TrainConfig
from zerovision.training.config.global_batch import divide_given
from zerovision.training.data import data_options, load_data
from zerovision.training.engines.precision import under_autocast
from zerovision.training.out_of_memory import is_out_of_memory
from zerovision.training.world.mesh_sizes import data_ranks

IMAGENET: dict[str, Any] = {
    "classes": 1000,
    "image_size": 224,
    "images": 1_281_167,
}  # planned for if no --data is given
STEPS, WARM_UP_STEPS = 20, 5  # that are timed, and before


def job_of(flags: PlanFlags) -> tuple[PlannedJob, str]:
    """Return the job that the flags describe, and the assumptions for missing values.

    Raises:
        UserError: for anything that cannot be planned.
    """
    given, others, config = flags
    if given.gpu_memory:
        if given.gpu:
            raise UserError("--gpu and --gpu-memory exclude each other: give one.")
        given.gpu = f"{given.gpu_memory:.3f}gb"
    if given.measure and given.gpu:
        raise UserError("--measure trains on this machine: leave --gpu out.")
    ranks = given.num_gpus
    per_node = given.gpus_per_node or min(ranks, GPUS_PER_NODE)
    fewer, more = ranks // per_node * per_node, -(-ranks // per_node) * per_node
    if fewer not in (0, more):
        raise UserError(
            f"--num-gpus {ranks} is not a multiple of {per_node} GPUs per machine: give {fewer} or {more}, or "
            "--gpus-per-node."
        )
    if config.global_batch and config.batch_size != "auto":
        config = dataclasses.replace(divide_given(config, data_ranks(ranks, config.mesh)), global_batch=0)
    machine = Machine(find_gpu(given.gpu), per_node) if given.gpu else detect_machine(per_node)
    has_data = given.with_data or any(word.partition("=")[0] == "--data" for word in others)
    data, assumed = _data(config, has_data=has_data)
    if given.images:
        data["images"] = given.images
    if given.classes:
        data["classes"] = given.classes
    config = dataclasses.replace(config, image_channels=data.pop("image_channels"))
    return with_planned_batch(PlannedJob(config, machine, ranks, **data)), assumed


def plan(flags: PlanFlags) -> int:
    """Print the plan for a command line; return the exit code.

    Raises:
        UserError: for anything that cannot be planned, and if the training fits nowhere.
    """
    job, assumed = job_of(flags)
    chosen, rungs = recommend(job)
    step_s = None
    if flags.given.measure:
        config: Any = {"batch_size": chosen.config.micro_batch, "precision": job.precision}
        try:
            step_s = measured_s(dataclasses.replace(job.config, **config), job.classes, job.image_size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"--measure: a step of {plural(chosen.config.micro_batch, 'image')} in one process ran out of this "
                f"machine's memory ({one_line(error, 160) or 'MemoryError'}): give a smaller --batch-size."
            ) from None
    print_plan(job, chosen, rungs, assumed, step_s, as_json=flags.given.json)
    return 0


def measured_s(config: TrainConfig, classes: int, image_size: ImageSize) -> float:
    """Train `STEPS` steps of a micro-batch of random images on this machine's first GPU, or its CPU, in one process.

    Args:
        config: settings with model, micro-batch, channels of the images, optimizer, and a resolved precision; the loss
            is not scaled here.
        classes: number of classes.
        image_size: in pixels.

    Returns:
        The median seconds of forward, backward and update.
    """
    limit_threads()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = build_network(config, classes, image_size).to(device).to(memory_format=torch.channels_last)
    optimizer = optimizer_of(network, config)
    forward = under_autocast(network, config.precision, device)
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


def _data(config: TrainConfig, *, has_data: bool) -> tuple[dict[str, Any], str]:
    """Return classes, images, size, channels (as given, or 3) and the assumptions."""
    if not has_data:
        size = config.image_size or IMAGENET["image_size"]
        text = f"no --data: {IMAGENET['images']:,} images of {IMAGENET['classes']:,} classes at {size} pixels"
        return IMAGENET | {"image_size": size, "image_channels": config.image_channels}, text
    data = load_data(data_options(config))
    size = data.train.sizes[-1]
    counts = {"classes": len(data.class_names), "images": sum(data.train_counts), "image_size": size}
    channels = config.image_channels if data.preprocessing.channels == 3 else data.preprocessing.channels
    return counts | {"image_channels": channels}, ""
