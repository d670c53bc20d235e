"""One rank of `memory.py` and `engines.py`: trains a few steps and writes the bytes that it holds, and needs at most.

Measured on a CPU is the proportional set size: the pages that are resident, those shared by k processes counted as a
k-th; and the resident set, which counts them in full. glibc is told to give freed memory back at once, so that
resident means in use. On a GPU PyTorch's allocator says.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path

import torch

from benchmarks.our_engine import make_engine, training_step
from benchmarks.peers.bare_ddp import VARIANTS
from benchmarks.peers.job import Job
from models.build import build_model
from training.parallel.collectives import barrier
from training.parallel.world import World, start_world, stop_world

SAMPLE_SECONDS = 0.01
STEPS = 3  # the first creates the optimizer's state


def resident_bytes() -> tuple[int, int]:
    """Return this process's proportional set size and its resident set size; on a GPU the allocator's bytes twice.

    Without the pages of files: those are the libraries', and their proportion depends on who else runs here.
    """
    if torch.cuda.is_available():
        return (torch.cuda.memory_allocated(),) * 2
    text = Path("/proc/self/smaps_rollup").read_text() + Path("/proc/self/status").read_text()
    sizes = {line.split()[0]: 1024 * int(line.split()[1]) for line in text.splitlines() if line.endswith("kB")}
    return sizes["Pss_Anon:"] + sizes["Pss_Shmem:"], sizes["Anonymous:"] + sizes["RssShmem:"]


class Peak:
    """Samples the memory in a thread of its own while its block runs; on a GPU asks the allocator afterwards."""

    def __init__(self, world: World) -> None:
        self._is_cuda = world.device.type == "cuda"
        self._over = threading.Event()
        self.bytes = (0, 0)

    def __enter__(self) -> Peak:
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._thread = threading.Thread(target=self._watch)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_cuda:
            self.bytes = (torch.cuda.max_memory_allocated(),) * 2
            return
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            now = resident_bytes()
            self.bytes = (max(self.bytes[0], now[0]), max(self.bytes[1], now[1]))
            time.sleep(SAMPLE_SECONDS)


def train(
    model: str, strategy: str, batch_size: int, image_size: int, classes: int, engine: str, world: World
) -> dict[str, int]:
    """Train `STEPS` steps; return the bytes held between steps and the most in the last step, all over the start.

    `engine` is as `--engine`, or one of PyTorch's own loops in `benchmarks.peers.bare_ddp`, which has no strategy.
    """
    start, resident_at_start = resident_bytes()
    torch.manual_seed(0)
    module = build_model(model, num_classes=classes, image_size=image_size, batch_size=batch_size).module
    built = None if engine in VARIANTS else make_engine(module, strategy, "fp32", batch_size, world, engine=engine)
    step = training_step(built) if built else VARIANTS[engine](module.to(world.device), Job())
    images = torch.randn(batch_size, 3, image_size, image_size, device=world.device)
    labels = torch.randint(classes, (batch_size,), device=world.device)
    for _ in range(STEPS - 1):
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
    """Warm up on a small model, which loads the libraries; then measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-type", required=True)
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--image-size", type=int, required=True)
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--result", required=True, help="a file per rank; {} stands for the rank")
    given = parser.parse_args()
    world = start_world()
    train("basic_cnn", given.strategy, 2, 32, 10, given.engine, world)
    sizes = (given.batch_size, given.image_size, given.classes)
    found = train(given.model_type, given.strategy, *sizes, given.engine, world)
    Path(given.result.format(world.rank)).write_text(json.dumps(found))
    stop_world()


if __name__ == "__main__":
    main()
