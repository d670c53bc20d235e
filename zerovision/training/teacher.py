"""`--teacher`: the trained network whose answers a run learns, found, checked, and told from others by its hash.

Where nothing changes the images it answers once, before the first epoch, and not in each.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from zerovision.models.build import build_model
from zerovision.models.class_order import Names, order_of, published_classes
from zerovision.models.dry_run import forward_failure
from zerovision.models.preparation import Preparation, differences
from zerovision.models.timm_models import published_config
from zerovision.training.base.errors import UserError, one_line, shown
from zerovision.training.base.places import log_folder
from zerovision.training.base.run_folder import WEIGHTS
from zerovision.training.base.small_files import read_small_text
from zerovision.training.base.units import format_duration, plural
from zerovision.training.cached_features import SampleRows
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.config import TrainConfig
from zerovision.training.data.class_names import read_class_names
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.reader import Batch
from zerovision.training.data.transfer import to_device
from zerovision.training.engines.precision import under_autocast
from zerovision.training.loop import forward_all
from zerovision.training.observe.new_run import run_folder
from zerovision.training.steps.carrier import Run
from zerovision.training.world.collectives import agreed, broadcast_object, gather_objects
from zerovision.training.world.world import World

TIMM = "timm:"
MOST_KEPT_BYTES = 2 * 10**9  # of answers, on each rank


class Teacher:
    """From a batch of a run, with images float32 [B, C, S, S] as its network takes them, to logits [B, classes].

    In evaluation mode, without gradients, in float32: a function of the images alone, the same on any rank.

    Args:
        module: the network.
        order: where each class of the data is among its own, int64 [classes].
        own: means and standard deviations of its images, per channel, float64 [2, C].
        given: those of the run.
        precision: of its arithmetic, as of the run's.
        device: of the images.

    Attributes:
        digest: sha256 of its tensors.
        kept: its answers to the training images, float32 [N, classes], which go before new ones; None without.
        note: how the run prepares images otherwise than its own were, '' if it does not.
    """

    note = ""

    def __init__(
        self,
        module: nn.Module,
        order: torch.Tensor,
        own: torch.Tensor,
        given: torch.Tensor,
        precision: str,
        device: torch.device,
    ) -> None:
        self.digest = _digest_of(module)
        self.kept: torch.Tensor | None = None
        module = module.eval().requires_grad_(False).to(device).to(memory_format=torch.channels_last)
        self._network, self._order = under_autocast(module, precision, device), order.to(device)
        factors = torch.stack([given[1] / own[1], (given[0] - own[0]) / own[1]])[:, :, None, None]
        self._normalization = None if torch.equal(own, given) else factors.float().to(device)

    @property
    def identity(self) -> dict[str, str]:
        """What a checkpoint and the run that resumes from it must agree on."""
        return {"teacher": self.digest}

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Answer to a batch of training images."""
        if self.kept is None:
            return self.answer(batch.images)
        return self.kept.index_select(0, to_device(batch.indices, self.kept.device))

    def answers(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield each batch with new answers, as `Engine.outputs`."""
        for batch in batches:
            yield batch, self.answer(batch.images)

    @torch.no_grad()
    def answer(self, images: torch.Tensor) -> torch.Tensor:
        """Answer anew."""
        if self._normalization is not None:
            scale, offset = self._normalization
            images = images * scale + offset
        return self._network(images).float().index_select(1, self._order)


def load_teacher(config: TrainConfig, data: DatasetPair, precision: str, world: World) -> Teacher | None:
    """Load the teacher that a configuration names, None without; a collective.

    Raises:
        UserError: on all ranks, if there is none, it does not fit the data, or ranks have different ones.
    """
    if not config.distill:
        return None

    def load() -> Teacher:
        module, classes, made = _load_timm(config, data) if is_timm else _load_file(config)
        here = Preparation.of_run(data.preprocessing)
        own, given = (torch.tensor(each[:2], dtype=torch.float64) for each in (made, here))
        if own.shape != given.shape:
            raise UserError(
                f"--teacher {config.teacher} takes images of {own.shape[1]} channel(s), these have {given.shape[1]}."
            )
        for size in data.train.sizes:
            failure = forward_failure(module, size, config.micro_batch, data.preprocessing.channels)
            if failure:
                raise UserError(f"--teacher {config.teacher} takes no images of {size} pixels: {one_line(failure)}.")
        order = torch.tensor(_order(config, data, classes))
        teacher = Teacher(module, order, own, given, precision, world.device)
        if config.teacher_classes:  # of another order it is another teacher
            teacher.digest = hashlib.sha256(f"{teacher.digest} {order.tolist()}".encode()).hexdigest()
        teacher.note = differences(made, here, of_arrays=data.train.source.in_memory)
        return teacher

    is_timm = config.teacher.startswith(TIMM)
    # One rank per machine goes first and downloads; the others then find the weights in the cache.
    first = agreed(lambda: load() if world.local_rank == 0 else None, world)
    teacher = agreed(lambda: first or load(), world)
    digest = broadcast_object(teacher.digest, world)

    def check() -> None:
        if teacher.digest != digest:
            raise UserError(
                f"--teacher {config.teacher} is another on rank {world.rank} than on rank 0: copy one to all."
            )

    agreed(check, world)
    return teacher


def keep_answers(run: Run) -> int:
    """Let the teacher answer to each training image once, if it is the same in every epoch; a collective.

    That has the bits of an answer in each epoch where they do not depend on an image's place in the batch.

    Returns:
        The number of the signal that ended it, 0 for none.
    """
    teacher, loader, world, begin = run.task.learns_from, run.readers.train, run.world.data, time.perf_counter()
    classes, is_left = len(run.data.class_names), run.total_steps > run.position
    fits = 4 * classes * len(loader.dataset) <= MOST_KEPT_BYTES
    if teacher is None or not (loader.dataset.is_constant and is_left and fits):
        return 0
    rows = SampleRows(loader, world)
    with run.clock.evaluation:
        once, add = loader.each_once(), rows.add
        if stop_signal := forward_all(teacher.answers, once, add, run=run, is_interruptible=True):
            return stop_signal
    images, answers = (part.flip(0) for part in rows.first)
    is_same = torch.equal(teacher.answer(images), answers)
    if not all(gather_objects(is_same, world)):
        run.loggers.message(
            "note: here the last bits of a teacher's answer depend on an image's place in the batch: it answers in "
            "every epoch"
        )
        return 0
    teacher.kept = rows.values
    seconds = format_duration(time.perf_counter() - begin)
    run.loggers.message(f"teacher      answered to {len(loader.dataset)} images in {seconds}, for all epochs")
    return 0


class _Outputs(NamedTuple):
    """How many outputs a teacher has, and lists of their names, of which it may have several or none."""

    number: int
    known: Sequence[Names]


def _order(config: TrainConfig, data: DatasetPair, outputs: _Outputs) -> list[int]:
    """Return which output of the teacher is which class of the data.

    Raises:
        UserError: if it is not known of each of them.
    """
    known, states = outputs.known, "--teacher-classes FILE, the data's name of each of its outputs, one a line"
    if config.teacher_classes:
        known = [_stated_classes(config.teacher_classes)]
        if len(known[0]) != outputs.number:
            raise UserError(
                f"--teacher-classes {config.teacher_classes} has {plural(len(known[0]), 'line')}, --teacher "
                f"{config.teacher} {outputs.number} outputs: give a line for each."
            )
    if not known:
        raise UserError(
            f"--teacher {config.teacher} has no names for its {outputs.number} classes, and an equal number is no "
            f"equal order: give {states}."
        )
    order, missing = order_of(data.class_names, known)
    if missing:
        raise UserError(
            f"--teacher {config.teacher} does not know {len(missing)} of the {len(data.class_names)} classes, such as "
            f"{shown(missing[0])}; what it knows is such as {shown(known[0][0])}: give one that was trained on them, "
            f"or, if only the names differ, {states}."
        )
    return order


def _stated_classes(path: str) -> Names:
    """Return the lines of a file of names.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        text = read_small_text(Path(os.path.expanduser(path)))
    except (OSError, ValueError) as error:
        raise UserError(f"--teacher-classes {path} cannot be read: {one_line(error)}.") from None
    return read_class_names(text.encode(), path)


def _load_file(config: TrainConfig) -> tuple[nn.Module, _Outputs, Preparation]:
    """Return the network of a run or a file, its classes, and how its images were prepared."""
    given = Path(os.path.expanduser(config.teacher))
    logs = (run_folder(config).path.parent, log_folder() / "runs")
    places = [given, *(folder / WEIGHTS for folder in (given, *(log / config.teacher for log in logs)))]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise UserError(
            f"--teacher {config.teacher} is no run with a {WEIGHTS} in {logs[0]}, no such folder, and no file: give "
            "one, or timm:NAME."
        )
    module, metadata = load_model(path)
    names = metadata["class_names"]
    return module, _Outputs(len(names), [names]), Preparation.of_run(metadata["preprocessing"])


def _load_timm(config: TrainConfig, data: DatasetPair) -> tuple[nn.Module, _Outputs, Preparation]:
    """Return a network with its published weights, what its classes are called, and how its images were prepared."""
    try:
        published = published_config(config.teacher.removeprefix(TIMM))
        if not published["num_classes"]:
            raise UserError("it has features and no classes: train a head on it, and give that run")
        built = build_model(
            config.teacher,
            num_classes=published["num_classes"],
            image_size=data.preprocessing.image_size,
            image_channels=data.preprocessing.channels,
            pretrained=True,
            keep_stem=True,
        )
    except UserError as error:  # which says what to type for the model of a run
        raise UserError(f"--teacher {config.teacher}: {str(error).partition(' Type --weights')[0]}") from error
    made = Preparation.of_timm(published)
    if data.preprocessing.channels != 3:
        made = made._replace(mean=data.preprocessing.mean, std=data.preprocessing.std)
    return built.module, _Outputs(published["num_classes"], published_classes(published)), made


def _digest_of(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
