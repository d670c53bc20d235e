"""This project: the engine for steps from memory, the launcher for training from files."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.launch import run
from benchmarks.our_engine import make_engine, training_step
from benchmarks.peers.job import Job, Measure, Step, make_network, timed
from zerovision.training.engines.ways import STRATEGIES
from zerovision.training.world.world import World

SHARED_MEMORY = (
    "Under `ddp` CPU ranks of one machine share one copy of our weights, in memory that all of them map, and read each "
    "other's gradients there."
)


def our_step(job: Job, strategy: str, engine: str = "auto") -> Step:
    """Return one step as `zerovision.training.loop` takes it, logging apart."""
    size, rank = dist.get_world_size(), dist.get_rank()
    world = World(rank=rank, local_rank=rank, local_size=size, size=size, device=torch.device("cpu"))
    return training_step(
        make_engine(
            make_network(job),
            strategy,
            "fp32",
            job.batch_size,
            world,
            learning_rate=job.learning_rate,
            weight_decay=job.weight_decay,
            engine=engine,
            gradient_clipping=job.gradient_clipping,
        )
    )


def step_contestants(job: Job) -> dict[str, Measure]:
    """Return every strategy over batches in memory."""
    return {strategy: timed(our_step(job, strategy)) for strategy in STRATEGIES}


def epoch_seconds(job: Job, ranks: int, logs: Path, flags: tuple[str, ...]) -> list[float]:
    """Train from JPEG files through the launcher; return what metrics.jsonl says of each epoch.

    The cache of decoded images starts empty: it is keyed by the files' names and sizes, and one file is made new.

    Raises:
        RuntimeError: with what the launcher said, where it failed.
    """
    spoil_cache(Path(job.data))
    words = [job.model_type, job.variant, str(ranks), str(job.batch_size), str(job.epochs), "--data", job.data]
    recipe = {
        "image-size": job.image_size,
        "learning-rate": job.learning_rate,
        "weight-decay": job.weight_decay,
        "augmentation": "crop_flip",
        "cache": "ram",
        "gradient-clipping": 0,
        "label-smoothing": 0,
        "warmup-epochs": 0,
        "final-learning-rate-scale": 1,
        "precision": "fp32",
        "save-every-minutes": 0,
        "log-dir": logs,
        "run-name": "run",
    }
    command = ["env", "OMP_NUM_THREADS=1", "bash", "scripts/launch_distributed.sh", *words]
    command += [word for name, value in recipe.items() for word in (f"--{name}", str(value))] + list(flags)
    run(command)
    lines = [json.loads(line) for line in (logs / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["seconds"] for line in lines if line["kind"] == "epoch"]


def spoil_cache(data: Path) -> None:
    """Give one validation image another size in bytes, by bytes after the end of its JPEG stream."""
    first = min((data / "val").rglob("*.jpg"))
    content = first.read_bytes()
    end = content.rindex(b"\xff\xd9") + 2
    first.write_bytes(content[:end] + bytes(secrets.randbelow(60_000)))
