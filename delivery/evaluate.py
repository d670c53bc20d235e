"""Runs a finished model over the images that it is judged on, on one process or on all ranks."""

from __future__ import annotations

import sys

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from delivery.evaluation_data import EvaluationData
from training.data.bad_images import bad_image_lines, check_bad_images
from training.data.loader import EvaluationLoader, automatic_workers
from training.data.sampler import EvaluationPlan
from training.observe.scores import SampleRecorder, Scores, sample_losses
from training.parallel.collectives import agreed
from training.parallel.precision import under_autocast
from training.parallel.world import World


def judge(
    module: nn.Module, data: EvaluationData, world: World, *, num_classes: int, batch_size: int, precision: str
) -> Scores:
    """Return the exact scores of every image, each counted once; a collective.

    Args:
        module: images float32 [B, 3, S, S] to logits [B, classes], in evaluation mode; it is moved to the device.
        data: the images and the model's number of each of their classes.
        world: the ranks, which share the images.
        num_classes: classes of the model.
        batch_size: images of one forward pass of one rank.
        precision: "fp32", "bf16" or "fp16", as `training.parallel.precision`.

    Raises:
        UserError: on all ranks, if an image on any rank cannot be read, or more of them than may be skipped.
    """
    network = under_autocast(module.to(world.device), precision, world.device)
    dataset = data.datasets.val
    plan = EvaluationPlan(len(dataset), batch_size, world.size)
    workers = automatic_workers(dataset, world.device, world.local_size)
    loader = EvaluationLoader(data.datasets, plan, world.rank, workers=workers, device=world.device)
    label_map = data.label_map.to(world.device)
    recorder, console = SampleRecorder(num_classes), Console(stderr=True)

    def all_batches() -> None:
        is_silent = not (world.is_main and console.is_terminal)
        with torch.inference_mode():
            for batch in track(loader, "evaluating", len(loader), console=console, transient=True, disable=is_silent):
                logits, labels = network(batch.images), label_map[batch.labels]
                recorder.add(sample_losses(logits, labels), logits, labels, batch.weights, batch.indices)

    try:
        agreed(all_batches, world)
    finally:
        loader.close()
    check_bad_images(loader, world)
    for line in bad_image_lines([loader], world):
        if world.is_main:
            print(line, file=sys.stderr)
    return recorder.gather(world)
