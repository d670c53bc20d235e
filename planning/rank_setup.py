"""The set-up of chosen ranks of a large run, one after another on one CPU, in a process group that sends nothing.

What a rank would do before its first step is done here by the same code: configuration, data set, model, its part of
the training state, the samples of an epoch, and its file of a checkpoint. So what does not divide, does not fit or
makes too many files shows before the cluster is there.
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from planning.doctor.table import print_rows
from planning.search import PlannedJob
from planning.setup_checks import RankSetUp, check_evaluation, check_files, check_memory, check_order, check_parts
from training.checkpoint.shards import Snapshot, write_shard
from training.data import data_options, load_data
from training.data.datasets import DatasetPair
from training.data.sampler import build_plan
from training.errors import UserError
from training.observe.scores import ScoreSums
from training.parallel import torch_distribution
from training.parallel.build_engine import build_engine, resolve_engine
from training.parallel.deepspeed_config import read_strategy_json
from training.parallel.model import build_training_model
from training.parallel.parameter_shards import WEIGHTS, index_of
from training.parallel.world import World
from training.run import set_up_engine

Result = TypeVar("Result")
ALL_RANKS = 8  # of a run of at most so many every rank is set up, of a larger one the first, middle and last


def set_up_ranks(job: PlannedJob, *, as_json: bool = False) -> int:
    """Set ranks of a job up, print a row per check, and return the exit code: 1 if anything is wrong.

    Args:
        job: whose data set is here, perhaps with another number of images.
        as_json: whether to print JSON.
    """
    start, rows = time.monotonic(), []
    config, ranks = job.config, chosen_ranks(job.ranks)
    data = load_data(data_options(config))
    labels = data.train.source.labels if job.images == len(data.train) else torch.zeros(job.images, dtype=torch.int64)
    plan = build_plan(config, labels, job.ranks)
    rows += [check_order(plan), check_evaluation(len(data.val), config.micro_batch, job.ranks)]
    found = [in_own_process(set_up_rank, job, data, rank) for rank in ranks]
    gpu = job.machine.gpu if job.has_gpus else None
    rows += [check_parts(found, job.ranks), check_files(found, job.ranks), check_memory(found, gpu)]
    if as_json:
        print(json.dumps({"ranks": ranks, "rows": [dataclasses.asdict(row) for row in rows]}, indent=2))
    else:
        print(
            f"{config.model_type}, {config.strategy}, --engine {found[0].engine}: ranks {', '.join(map(str, ranks))} "
            f"of {job.ranks} on {job.ranks // job.machine.ranks} machine(s), {plan.global_batch} images a step"
        )
        print_rows(rows, time.monotonic() - start)
    return int(any(row.verdict == "wrong" for row in rows))


def chosen_ranks(world: int) -> list[int]:
    """Return the ranks that are set up."""
    return [*range(world)] if world <= ALL_RANKS else [0, world // 2, world - 1]


def in_own_process(action: Callable[..., Result], *arguments: Any) -> Result:
    """Return what a function returns in a process of its own: libraries remember the first process group for ever.

    Raises:
        UserError: of the function, or if its process ends, as for lack of memory.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), torch.set_num_threads, (1,)) as pool:
        try:
            return pool.submit(action, *arguments).result()
        except BrokenProcessPool:
            raise UserError("a rank's set-up was killed: this machine has too little memory for one.") from None


class _SilentDataParallel(DistributedDataParallel):
    """Sums no gradients: PyTorch's own way of doing so waits for results that a fake group does not have."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_comm_hook(None, noop_hook)


@contextmanager
def fake_world(rank: int, size: int, per_machine: int) -> Iterator[World]:
    """Be one rank of many: collectives return at once, and every other rank seems to send what this one does.

    It changes the process for good, see `in_own_process`.
    """
    warnings.simplefilter("ignore")  # of a backward whose gradients go nowhere
    setattr(torch_distribution, "DistributedDataParallel", _SilentDataParallel)  # noqa: B010
    os.environ.update(LOCAL_RANK=str(rank % per_machine), RANK=str(rank), WORLD_SIZE=str(size))  # DeepSpeed reads them
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        group = cast(dist.ProcessGroup, dist.new_group(backend="fake"))
        yield World(rank, rank % per_machine, per_machine, size, torch.device("cpu"), group, group)
    finally:
        dist.destroy_process_group()


def set_up_rank(job: PlannedJob, data: DatasetPair, rank: int) -> RankSetUp:
    """Build one rank's model and engine and write its file of a checkpoint into a temporary folder.

    Raises:
        UserError: as that rank would.
    """
    config = job.config
    with fake_world(rank, job.ranks, job.machine.ranks) as world, tempfile.TemporaryDirectory() as folder:
        strategy_json = read_strategy_json(config.strategy, config.deepspeed_config)
        built, _ = build_training_model(config, data, world)
        setup, engine_name = set_up_engine(config, built, strategy_json, "fp32", world, compiles=False)
        if config.engine == "auto":  # as on the cluster's GPUs
            gpu = torch.device("cuda")
            engine_name = resolve_engine("auto", setup.plan, strategy_json, built.module, gpu, config.optimizer)
        # As on GPUs: CPU ranks of one machine would share memory instead of sending.
        alone = dataclasses.replace(setup, world=dataclasses.replace(world, local_size=0))
        engine = build_engine(alone, engine_name)
        state, snapshot = engine.state(), Snapshot()
        snapshot.take(state, ScoreSums(len(data.class_names), world.device).state())
        boxes: dict[str, list[tuple[slice, ...]]] = {}
        for shard in state.shards:
            boxes.setdefault(shard.name, []).append(index_of(shard.offsets, shard.tensors[WEIGHTS].shape))
        tensors = [*engine.module.parameters(), *engine.module.buffers()]
        tensors += [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        tensors += [tensor for shard in state.shards for tensor in shard.tensors.values()]
        result = RankSetUp(
            rank=rank,
            engine=engine_name,
            boxes=boxes,
            parameters=sum(math.prod(shape) for shape in state.shapes.values()),
            values_per_parameter=1 + len(state.moment_kinds),
            held_bytes=_storage_bytes(tensors),
            file_bytes=write_shard(Path(folder) / "shard", snapshot).bytes,
        )
        engine.close()
    return result


def _storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the tensors' memory, each piece once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in local}.values())
