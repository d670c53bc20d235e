"""Times real steps on this machine."""

from __future__ import annotations

import statistics
import time

import torch

from zerovision.models.sides import ImageSize, sides
from zerovision.planning.run_workload import build_network, optimizer_of
from zerovision.training.base.control_groups import limit_threads
from zerovision.training.config import TrainConfig
from zerovision.training.engines.precision import under_autocast

STEPS, WARM_UP_STEPS = 20, 5


def measured_s(config: TrainConfig, classes: int, image_size: ImageSize) -> float:
    """Train `STEPS` steps of a micro-batch of random images on this machine's first GPU, or its CPU, in one process.

    Args:
        config: with model, micro-batch, channels of the images, optimizer, and a resolved precision, whose loss is not
            scaled here.
        classes: of the data set.
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
