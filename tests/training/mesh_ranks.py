"""What the tests of a mesh run on each rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist

from tests.kit import Recorder
from zerovision.training.base.points import Loggers
from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint.store import TrainState
from zerovision.training.config import TrainConfig
from zerovision.training.data.reader import Batch
from zerovision.training.engines.build import form_ranks
from zerovision.training.engines.engine import Engine, StepResult
from zerovision.training.engines.model_buffers import ModelBuffers
from zerovision.training.observe.observer import Seen, StepDone
from zerovision.training.steps.nonfinite_steps import NonFiniteGuard
from zerovision.training.tasks.scores import ScoreSums
from zerovision.training.world import collectives
from zerovision.training.world.collectives import (
    barrier,
    broadcast_object,
    copy_from_main,
    gather_objects,
    gather_rows,
    largest_over_ranks,
    sum_over_ranks,
)
from zerovision.training.world.world import World, form_mesh


def neighbours(world: World, tensor: int, pipeline: int) -> dict[str, Any]:
    """Return the rank's group along each dimension by what every collective of it says."""
    mesh = form_ranks(TrainConfig(pipeline_parallel=pipeline, tensor_parallel=tensor), world)
    found: dict[str, Any] = {"text": mesh.describe()}
    groups = {name: mesh.dimension(f"{name}_parallel") for name in ("pipeline", "tensor")}
    for name, group in {"data": mesh.data, "replica": mesh.replica, **groups}.items():
        own, mains = torch.tensor([float(world.rank)]), torch.tensor([float(world.rank)])
        barrier(group)
        copy_from_main([mains], group)
        found[name] = {
            "place": [group.rank, group.size],
            "local": [group.local_rank, group.local_size],
            "rows": gather_rows(own, group)[:, 0].tolist(),
            "objects": gather_objects(world.rank, group),
            "sum and largest": [sum_over_ranks(own, group).item(), largest_over_ranks(own, group).item()],
            "of main": [mains.item(), broadcast_object(world.rank, group)],
        }
    return found


def copied(world: World, most_bytes: int, source: int) -> dict[str, Any]:
    """Copy one rank's tensors to all; return what this rank had and has, and how many bytes each broadcast was of."""
    generator = torch.Generator().manual_seed(world.rank)
    shapes = [(5,), (), (2, 3, 4, 4), (0,), (3, 7), (1,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[2] = tensors[2].contiguous(memory_format=torch.channels_last)
    before, sent = [tensor.tolist() for tensor in tensors], []

    def broadcast(flat: torch.Tensor, **options: Any) -> None:
        sent.append(flat.nbytes)
        dist.broadcast(flat, **options)

    with (
        mock.patch.object(collectives, "BROADCAST_BYTES", most_bytes),
        mock.patch.object(collectives, "dist", SimpleNamespace(broadcast=broadcast)),
    ):
        copy_from_main(tensors, world, source)
    return {"before": before, "after": [tensor.tolist() for tensor in tensors], "sent": sent}


def skip(world: World, tensor: int, pipeline: int) -> list[str]:
    """Return what a rank says of a step in which the ranks at the last place of data have a loss that is not finite."""
    data, log = form_mesh(world, {"pipeline_parallel": pipeline, "tensor_parallel": tensor}).data, Recorder()
    engine = cast(Engine, SimpleNamespace(buffers=ModelBuffers(torch.nn.Identity()), loss_scale=None, group=""))
    state = TrainState(engine, ScoreSums(2, data.device), Progress())
    guard = NonFiniteGuard(state, data, Loggers([log]), 0, "{}.png".format)
    guard.before_step(0)
    batch = Batch(torch.zeros(1, 1, 2, 2), torch.zeros(1), torch.ones(1), torch.tensor([data.rank]))
    losses = torch.tensor([torch.nan if data.rank == data.size - 1 else 1.0])
    guard.seen(Seen(batch, losses, losses, losses))
    guard.after_step(StepDone(0, StepResult(False, torch.inf)))
    return log.messages
