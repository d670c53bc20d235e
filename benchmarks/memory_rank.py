"""One rank of `memory.py` and `engines.py`: trains a few steps of a case; writes the bytes it holds, and at most.

Measured on a CPU is the proportional set size: the pages that are resident, those shared by k processes counted as a
k-th; and the resident set, which counts them in full. glibc is told to give freed memory back at once, so that
resident means in use, and the kernel keeps the most. On a GPU PyTorch's allocator says.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
from pathlib import Path

import torch

from benchmarks.our_engine import make_engine, training_step
from benchmarks.peers.bare_ddp import VARIANTS
from benchmarks.peers.job import Job
from zerovision.models.build import build_model
from zerovision.training.base.settings import RunSettings
from zerovision.training.world.collectives import barrier
from zerovision.training.world.world import World, form_mesh, start_world, stop_world

STEPS = 3  # the first creates the optimizer's state


@functools.cache
def mesh_of(world: World, tensor: int, pipeline: int) -> World:
    """Return the world with a mesh of these sizes."""
    return form_mesh(world, {"pipeline_parallel": pipeline, "tensor_parallel": tensor})


def sizes_in(*files: str) -> dict[str, int]:
    """Return the bytes by name in files of this process under /proc."""
    lines = "".join(Path("/proc/self", name).read_text() for name in files).splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith("kB")}


def resident_bytes() -> tuple[int, int]:
    """Return this process's proportional set size and its resident set size; on a GPU the allocator's bytes twice.

    Without the pages of files: those are the libraries', and their proportion depends on who else runs here.
    """
    if torch.cuda.is_available():
        return (torch.cuda.memory_allocated(),) * 2
    sizes = sizes_in("smaps_rollup", "status")
    return sizes["Pss_Anon"] + sizes["Pss_Shmem"], sizes["Anonymous"] + sizes["RssShmem"]


class Peak:
    """The most memory within its block, from the kernel's or the allocator's own high-water mark."""

    def __init__(self, world: World) -> None:
        self._is_cuda = world.device.type == "cuda"
        self.bytes = (0, 0)

    def __enter__(self) -> Peak:
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the mark is then what is resident now
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_cuda:
            self.bytes = (torch.cuda.max_memory_allocated(),) * 2
            return
        sizes = sizes_in("status")
        proportional, resident = resident_bytes()
        most = sizes["VmHWM"] - sizes["RssFile"]
        self.bytes = (most - (resident - proportional), most)  # what is shared stays from step to step


def train(
    model: str,
    strategy: str,
    batch_size: int,
    image_size: int,
    classes: int,
    engine: str,
    tensor: int,
    pipeline: int,
    micro_batches: int,
    world: World,
    steps: int = STEPS,
) -> dict[str, int]:
    """Train some steps; return the bytes held between steps and the most in the last step, all over the start.

    `engine` is as `--engine`, or one of PyTorch's own loops in `benchmarks.peers.bare_ddp`, which has no strategy. The
    sizes of the mesh are as in `mesh_of`.
    """
    mesh = mesh_of(world, tensor, pipeline)
    gc.collect()
    start, resident_at_start = resident_bytes()
    torch.manual_seed(0)
    module = build_model(RunSettings(model_type=model, batch_size=batch_size), classes, image_size).module
    built, shape = None, (3, image_size, image_size)
    if engine not in VARIANTS:
        how = {"engine": engine, "accumulation_steps": micro_batches, "image_shape": shape}
        built = make_engine(module, strategy, "fp32", batch_size, mesh, **how)
    step = training_step(built, micro_batches) if built else VARIANTS[engine](module.to(world.device), Job())
    images = torch.randn(batch_size * micro_batches, *shape, device=world.device)
    images = images.contiguous(memory_format=torch.channels_last)  # as the loaders hand them over: a step copies none
    labels = torch.randint(classes, (len(images),), device=world.device)
    for _ in range(steps - 1):
        step(images, labels)
    barrier(world)
    held = resident_bytes()[0] - start
    with Peak(world) as peak:
        step(images, labels)
        barrier(world)
    if built:
        built.close()
    return {"held": held, "peak": peak.bytes[0] - start, "peak_resident": peak.bytes[1] - resident_at_start}


def main() -> None:
    """Measure a case; each rank writes what it found."""
    parser = argparse.ArgumentParser()
    words = "[model, strategy, batch, size, classes, engine, tensor, pipeline, micro-batches]"
    parser.add_argument("--case", type=json.loads, required=True, help=words)
    parser.add_argument("--result", required=True, help="a file per rank; {} stands for the rank")
    given = parser.parse_args()
    world = start_world()
    train(*given.case, world, steps=1)  # loads the libraries, and generates their code for layers of these shapes
    Path(given.result.format(world.rank)).write_text(json.dumps(train(*given.case, world)))
    stop_world()


if __name__ == "__main__":
    main()
