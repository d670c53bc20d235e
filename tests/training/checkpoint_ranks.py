"""What the checkpoint tests run on each rank: the real loop, the real saver, the real engine on small data."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from timm.layers import DropPath
from torch import nn

from tests.kit import Recorder
from tests.stored_tensors import CountingFile
from tests.training.engine_ranks import (
    CLASSES,
    configuration,
    leaves_of,
    make_engine,
    make_small_data,
    observed,
    of_all_stages,
    weights_of,
    whole_tensors,
)
from zerovision.models.build import BuiltModel
from zerovision.models.ensemble import Ensemble
from zerovision.models.weights_metadata import Description
from zerovision.training.base.errors import RunEnded
from zerovision.training.base.points import Loggers
from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint import shards
from zerovision.training.checkpoint.store import TrainState, choose, find_candidates, keep_frozen, restore
from zerovision.training.data.batch_transforms import BatchTransforms
from zerovision.training.data.datasets import DatasetPair, ImageDataset
from zerovision.training.data.loader import Loader
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.engines.model_buffers import AVERAGE
from zerovision.training.engines.parameter_shards import frozen_parameters
from zerovision.training.engines.pipeline.engine import train_in_stages
from zerovision.training.engines.ways import STRATEGIES
from zerovision.training.loop import Accumulate, train_one_epoch
from zerovision.training.observe.observer import StepDone
from zerovision.training.recipe.schedule import Schedule
from zerovision.training.recipe.tuning import BackboneFreezer, tune
from zerovision.training.steps import saver
from zerovision.training.steps.carrier import Run, RunModel, Start
from zerovision.training.steps.saver import GIVE_UP_SECONDS, Saver
from zerovision.training.steps.watch import guard_of
from zerovision.training.steps.weight_average import EMA, SLOW_WEIGHTS, WeightAverages
from zerovision.training.tasks.contrast.comparison import GradientCache
from zerovision.training.tasks.labels import build_loss
from zerovision.training.tasks.scores import ScoreSums
from zerovision.training.world.collectives import barrier, broadcast_object
from zerovision.training.world.world import World, form_mesh

SAMPLES = 45  # three steps of 16, the last of them with a remainder
MICRO_BATCH = 4
GLOBAL_BATCH = 16
EPOCHS = 2
RATE = 0.01
HEAD = frozenset({"head.weight", "head.bias"})


class DropoutNet(nn.Module):
    """A convolution, BatchNorm where asked for, dropout, timm's drop path and a head.

    7 blocks of weights, so that 4 ranks have some.
    """

    def __init__(self, with_batchnorm: bool, image_channels: int = 3) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(image_channels, 192, 3, padding=1, bias=not with_batchnorm)
        self.norm = nn.BatchNorm2d(192) if with_batchnorm else nn.Identity()
        self.dropout, self.drop_path = nn.Dropout(0.3), DropPath(0.3)
        self.head = nn.Linear(192, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.norm(self.convolution(images))).mean((2, 3))
        return self.head(self.dropout(features + self.drop_path(features)))


class InfiniteGradient(torch.autograd.Function):
    """Identity whose gradient is infinite where `context.broken` says so."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, broken: bool) -> torch.Tensor:
        context.broken = broken
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (gradient / 0 if context.broken else gradient), None


def make_data(broken_sample: int = -1, image_channels: int = 3) -> DatasetPair:
    """45 images with a little augmentation; one of them may come out of it as NaN."""
    pair = make_small_data(SAMPLES, "shift", image_channels)
    if broken_sample >= 0:
        pair.train.batch_transforms = _NanInOne(pair.train, broken_sample)
    return pair


class _NanInOne(BatchTransforms):
    """Finishes batches, and makes one image of the set NaN."""

    def __init__(self, dataset: ImageDataset, broken_sample: int) -> None:
        super().__init__(dataset.preprocessing, dataset.augmentation, dataset.seed)
        self._broken_sample = broken_sample

    def from_set(self, bordered: torch.Tensor, places: np.ndarray, epoch: int, indices: np.ndarray) -> torch.Tensor:
        images = super().from_set(bordered, places, epoch, indices)
        images[torch.from_numpy(indices == self._broken_sample)] = float("nan")
        return images


class Job:
    """One small training on these ranks, with everything that the real one has but evaluation."""

    def __init__(
        self,
        world: World,
        folder: str,
        strategy: str,
        *,
        with_batchnorm: bool = False,
        every_steps: int = 0,
        precision: str = "fp32",
        clipping: float = 0.5,
        broken_sample: int = -1,
        most_bad_steps: int = 0,
        resume: str = "never",
        engine: str = "auto",
        is_frozen: bool = False,
        replicate_across: str = "none",
        is_averaged: bool = False,
        tuning: str = "full",
        image_channels: int = 3,
        optimizer: str = "adamw",
        is_contrastive: bool = False,
        stages: int = 1,
        members: int = 0,
    ) -> None:
        world = form_mesh(world, {"pipeline_parallel": stages})
        data = world.data
        accumulation = GLOBAL_BATCH // (MICRO_BATCH * data.size)
        config = configuration(
            strategy=strategy,
            gradient_accumulation_steps=accumulation,
            batch_size=MICRO_BATCH,
            gradient_clipping=clipping,
            engine=engine,
            optimizer=optimizer,
            replicate_across=replicate_across,
            pipeline_parallel=stages,
            seed=3,
            epochs=EPOCHS,
            log_every_steps=1,
            temperature=0.1,
            save_every_steps=every_steps,
            save_every_minutes=0.0,
            keep_last=100,
        )
        self.world, self.recorder = world, Recorder()
        loggers = Loggers([self.recorder])
        # A resumed run must not owe its weights to the seed.
        torch.manual_seed(0 if resume == "never" else 99)
        self.module = DropoutNet(with_batchnorm, image_channels)
        if members:
            self.module = Ensemble(DropoutNet(with_batchnorm, image_channels) for _ in range(members))
        if is_frozen:
            # Other values on each rank: rank 0's count.
            self.module.convolution.requires_grad_(False).weight += world.rank
        self.folder, found, frozen = Path(folder), None, None
        if resume != "never":
            candidates, _ = find_candidates(resume, self.folder, is_restart=False)
            found, self.refused = choose(candidates, world)
            assert found is not None, self.refused
        if tuning != "full":
            description = Description("basic_cnn", None, 2, 8, image_channels=image_channels)
            tune(BuiltModel(self.module, description, head_parameter_names=HEAD), tuning)
            self.folder.mkdir(exist_ok=True)
            parameters = frozen_parameters(self.module)
            frozen = keep_frozen(self.folder, parameters, found, is_main=world.is_main)
            barrier(world)
        heads = {name for name, _ in self.module.named_parameters() if "head." in name}
        self.freezer = BackboneFreezer(self.module, heads)
        self.engine = make_engine(world, self.module, config, precision)
        in_turn = leaves_of(self.engine, data, accumulation).in_turn
        repeats = 2 if is_contrastive else 1
        plan = BatchPlan(SAMPLES, MICRO_BATCH, accumulation, data.size, seed=3, repeats=repeats, in_turn=in_turn)
        schedule = Schedule(RATE, total_steps=EPOCHS * plan.steps_per_epoch, warmup_steps=1, final_scale=0.1)
        self.data = make_data(broken_sample, image_channels)
        self.loader = Loader(self.data.train, plan, data.rank)
        self.state = TrainState(self.engine, ScoreSums(CLASSES, world.device), Progress())
        self.is_averaged = is_averaged
        averages = WeightAverages(self.engine, *((0.6, 2) if is_averaged else (0.0, 0)), plan.steps_per_epoch)
        CountingFile.bytes_read = 0
        if found is not None:
            with mock.patch.object(shards, "safe_open", CountingFile):
                restore(found, self.state, world)
        loss = build_loss(config, self.data.class_names, self.data.train_counts, world.device)
        step = GradientCache(world, plan.leaves, 0.1, CLASSES) if is_contrastive else Accumulate(loss)
        if stages > 1 and not members:
            step = partial(train_in_stages, loss)
        source: Any = SimpleNamespace(name=lambda index: f"sample-{index}")
        names: Any = SimpleNamespace(
            preprocessing=self.data.preprocessing,
            class_names=self.data.class_names,
            train=SimpleNamespace(source=source),
        )
        run = Run(
            config=config,
            world=world,
            start=Start(),
            folder=cast(Any, SimpleNamespace(path=self.folder, checkpoints=self.folder)),
            data=names,
            plan=plan,
            model=RunModel(cast(Any, None), averages=averages, frozen=frozen),
            state=self.state,
            schedule=schedule,
            step=step,
            loggers=loggers,
        )
        self.guard = guard_of(run, most_bad_steps)
        self.saver = Saver(run, {"global batch": plan.global_batch}, self.guard)
        self.run = observed(run, self.guard, self.saver)

    def train(self) -> None:
        """Train to the end, averaging BatchNorm's buffers after each epoch as the real run does."""
        state = self.state
        for epoch in range(state.progress.epoch, EPOCHS):
            self.freezer.start_epoch(only_head=False)
            train_one_epoch(self.run, self.loader.epoch(epoch, state.progress.step))
            self.engine.buffers.average(self.world.data)
            self.epoch_scores = state.sums.reduce(self.world.data)
            state.sums.reset()
            state.progress = dataclasses.replace(state.progress, epoch=epoch + 1, step=0)
            self.saver.save()
        self.saver.finish()

    def report(self) -> dict[str, Any]:
        """Return what the tests compare."""
        return {
            "losses": {str(point.step): point.loss for point in self.recorder.points},
            "weights": weights_of(self.engine) | self.averages_by_name(),
            "samples": self.epoch_scores.samples,
            "train_loss": self.epoch_scores.loss,
            "events": [{"kind": kind} | values for kind, values in self.recorder.events],
            "messages": self.recorder.messages,
        }

    def averages_by_name(self) -> dict[str, Any]:
        """Return averages of the weights and buffers, which are the same in all leaves after an epoch."""
        if not self.is_averaged:
            return {}
        whole = whole_tensors(self.engine)
        tensors = {f"{kind} {name}": tensor for kind in (EMA, SLOW_WEIGHTS) for name, tensor in whole[kind].items()}
        buffers = self.engine.buffers.by_name().items()
        averages = {name: leaves[0].double().tolist() for name, leaves in buffers if name.startswith(AVERAGE)}
        return {name: tensor.double().tolist() for name, tensor in tensors.items()} | of_all_stages(averages)

    def close(self) -> None:
        self.run.start.stop.close()
        self.engine.close()


@cache
def warm_up(world: World) -> None:
    """Train a little under each strategy.

    DeepSpeed keeps state for a whole process: on 4 ranks the sums of ZeRO 2 come out one bit different once another
    stage has run in it. A real run has one strategy in its process; here many share one, so all come after this.
    """
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            job = Job(world, broadcast_object(folder, world), strategy)
            job.train()
            job.close()
            barrier(world)


def train_whole(world: World, folder: str, strategy: str, **options: Any) -> dict[str, Any]:
    """Train without interruption, saving at every step; the checkpoints stay in the folder."""
    warm_up(world)
    job = Job(world, folder, strategy, every_steps=1, **options)
    job.train()
    result = job.report()
    job.close()
    return result


def resume_from(world: World, checkpoint: str, folder: str, strategy: str, **options: Any) -> dict[str, Any]:
    """Go on from one checkpoint to the end, saving at every step into another folder."""
    warm_up(world)
    job = Job(world, folder, strategy, every_steps=1, resume=checkpoint, **options)
    buffers = {name: leaves.double().tolist() for name, leaves in job.engine.buffers.by_name().items()}
    job.train()
    result = job.report() | {"resumed_buffers": buffers, "resumed_leaves": [*job.engine.state().leaves]}
    result |= {"bytes_read": CountingFile.bytes_read}
    job.close()
    return result


def poisoned(
    world: World,
    folder: str,
    strategy: str,
    precision: str,
    clipping: float,
    culprit: str,
    most_bad_steps: int = 0,
    stages: int = 1,
) -> dict[str, Any]:
    """Break one step of the first epoch by an image, a loss or a gradient on one rank; return what became of it."""
    broken_sample = (
        int(BatchPlan(SAMPLES, MICRO_BATCH, 1, world.size, seed=3).draw_keys(0)[6]) if culprit == "image" else -1
    )
    job = Job(
        world,
        folder,
        strategy,
        with_batchnorm=True,
        precision=precision,
        clipping=clipping,
        broken_sample=broken_sample,
        most_bad_steps=most_bad_steps,
        stages=stages,
    )
    kept: dict[str, Any] = {}
    calls = 0

    def break_it(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        # The forward passes of the second step, on the last rank.
        accumulation = job.run.plan.accumulation_steps
        is_bad = (calls - 1) // accumulation == 1 and world.rank == world.size - 1
        if culprit == "loss":
            return output * float("nan") if is_bad else output
        return InfiniteGradient.apply(output, is_bad)

    if culprit != "image":
        job.module.register_forward_hook(break_it)
    after_step = job.guard.after_step
    before_step = job.guard.before_step

    def state() -> dict[str, Any]:
        return weights_of(job.engine) | {
            f"leaves of {name}": leaves.double().tolist() for name, leaves in job.engine.buffers.by_name().items()
        }

    def watched_before(position: int) -> None:
        before_step(position)
        kept["before"] = state()

    def watched_after(done: StepDone) -> None:
        after_step(done)
        if not done.applied:
            kept.update(
                bad_step=done.position + 1,
                unchanged=kept["before"] == state(),
                applied_steps=job.engine.state().applied_steps,
            )

    job.guard.before_step = watched_before  # type: ignore[method-assign]
    job.guard.after_step = watched_after  # type: ignore[method-assign]
    ended = None
    try:
        job.train()
    except RunEnded as error:
        ended = [str(error), error.exit_code]
        job.epoch_scores = job.state.sums.reduce(job.world.data)
    result = job.report() | {"ended": ended, "skipped": job.state.progress.skipped_steps}
    result |= {key: kept.get(key) for key in ("bad_step", "unchanged", "applied_steps")}
    job.close()
    return result


@contextlib.contextmanager
def full_disk(world: World, on_rank: int):
    """Let writes beyond 512 bytes of a file fail on one rank, as on a full disk (RLIMIT_FSIZE: 'File too large')."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == on_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_on_full_disk(world: World, folder: str, strategy: str, full_rank: int) -> dict[str, Any]:
    """Save once well, then with no room on one rank, with room, and again without, by rank 0's clock for 10 minutes."""
    job = Job(world, folder, strategy)

    def save(step: int) -> None:
        job.state.progress = dataclasses.replace(job.state.progress, step=step)
        job.saver.save()
        job.saver.wait()

    def names() -> list[str]:
        found = sorted(path.name for path in job.folder.iterdir())
        barrier(world)  # rank 0 begins the next save after all ranks have looked
        return found

    save(1)
    ended = None
    with full_disk(world, full_rank):
        save(2)
    names_after_failure = names()
    save(3)
    names_after_success = names()
    try:
        with full_disk(world, full_rank):
            save(4)
            save(5)
            ahead_s = GIVE_UP_SECONDS if world.is_main else 0.0
            clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
            with mock.patch.object(saver, "time", clock):
                save(6)
    except RunEnded as error:
        ended = [str(error), error.exit_code]
    result = {
        "after_failure": names_after_failure,
        "after_success": names_after_success,
        "at_end": names(),
        "messages": job.recorder.messages,
        "events": [{"kind": kind} | values for kind, values in job.recorder.events],
        "ended": ended,
        "last": (job.folder / "last").read_text(),
    }
    job.close()
    return result
