"""PyTorch's FSDP2 alone: `fully_shard` on every block and on the root, fused AdamW over the shards.

Images are in channels_last, weights are not: `fully_shard` refuses parameters that are not contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.job import (
    Job,
    Laps,
    Measure,
    Step,
    image_loader,
    make_adamw,
    make_network,
    run_from_files,
    timed,
    train_epochs,
)

# Contestant -> whether a block's weights are dropped after its forward, and gathered again for its backward.
VARIANTS = {"FSDP2": False, "FSDP2, resharding": True}


def blocks(module: nn.Module, *, in_sequence: bool = False) -> Iterator[nn.Module]:
    """Yield the outermost modules with weights that stand in an `nn.Sequential`: the blocks of timm's networks."""
    for child in module.children():
        if isinstance(child, nn.Sequential):
            yield from blocks(child, in_sequence=True)
        elif in_sequence and any(True for _ in child.parameters()):
            yield child


def sharded_step(job: Job, *, reshards: bool) -> Step:
    """Shard the network over all ranks, and return the usual loop."""
    module = make_network(job)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(module):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
    optimizer = make_adamw(module, job, fused=True)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        images = images.contiguous(memory_format=torch.channels_last)
        nn.functional.cross_entropy(module(images), labels).backward()
        optimizer.step()

    return step


def step_contestants(job: Job) -> dict[str, Measure]:
    """Return both over batches in memory."""
    return {name: timed(sharded_step(job, reshards=reshards)) for name, reshards in VARIANTS.items()}


def train_from_files(job: Job, laps: Laps) -> None:
    """Train from JPEG files."""
    train_epochs(job, image_loader(job), sharded_step(job, reshards=VARIANTS[job.variant]), laps)


if __name__ == "__main__":
    run_from_files(train_from_files)
