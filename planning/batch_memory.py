"""The memory of a rank by micro-batch: for `--batch-size auto`, and the one that fills a GPU."""

from __future__ import annotations

import dataclasses

from planning.search import Option, PlannedJob, evaluate, memory_of
from training.config import FIELDS
from training.global_batch import MOST_IMAGES_ON_CPU, divided, micro_batches, usual_global_batch
from training.model_fields import FEWEST_IMAGES
from training.observe.memory_limit import FILL

FIRST_PROBE, MOST_PROBES = 4, 5  # times the images of the option; sizes that are tried


def with_planned_batch(job: PlannedJob) -> PlannedJob:
    """Return a job whose batch size is the largest that is predicted to fit, instead of `auto`; the smallest if none.

    Raises:
        UserError: if the ranks cannot share the global batch.
    """
    config = job.config
    if config.batch_size != "auto":
        return job
    global_batch = config.global_batch or usual_global_batch(job.ranks)
    sizes = micro_batches(global_batch, job.ranks, 0 if job.has_gpus else MOST_IMAGES_ON_CPU)
    configs = [dataclasses.replace(divided(config, size, global_batch, job.ranks), global_batch=0) for size in sizes]
    most = FILL * job.machine.gpu.memory_bytes
    fitting = [each for each in configs if memory_of(job, each)[2].peak <= most]
    return dataclasses.replace(job, config=[configs[0], *fitting][-1])


def filling_batch(job: PlannedJob, chosen: Option) -> Option:
    """Return an option with as many images in a step, without accumulation, as are predicted to fit; at least its own.

    Memory grows with the images about as a line, never slower the more there are: a line through two sizes says where
    it reaches `FILL` of the GPU, and what that size needs says it better.
    """

    def with_images(count: int) -> Option:
        return evaluate(job, dataclasses.replace(chosen.config, batch_size=count, gradient_accumulation_steps=1))

    most, room = FIELDS["batch_size"].metadata["high"], FILL * job.machine.gpu.memory_bytes
    own = chosen.config.micro_batch
    found, least, count = chosen, with_images(own).memory.peak, FIRST_PROBE * own
    for _ in range(MOST_PROBES):
        option = with_images(count)
        if option.memory.peak <= room and count > found.config.micro_batch:
            found = option
        each = (option.memory.peak - least) / (count - own)
        before, count = count, min(int(own + (room - least) / each) // FEWEST_IMAGES * FEWEST_IMAGES, most)
        if count <= own or count == before:
            break
    return found
