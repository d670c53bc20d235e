"""`--teacher`: finds and checks the trained network whose outputs a run learns; a hash identifies this network.

If images are the same in every epoch, the teacher's outputs are computed only once, before the first epoch.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from zerovision.models import TIMM_PREFIX
from zerovision.models.build import build_model
from zerovision.models.class_order import Names, order_of, published_classes
from zerovision.models.dry_run import forward_failure
from zerovision.models.ensemble import mean_over_members
from zerovision.models.preparation import Preparation, differences
from zerovision.models.timm_models import published_config
from zerovision.training.base.errors import AgreedError, UserError, one_line, shown
from zerovision.training.base.files import read_small_text
from zerovision.training.base.run_folder import WEIGHTS, log_folder
from zerovision.training.base.settings import RunSettings
from zerovision.training.base.units import format_duration, plural
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.data.batch_transforms import to_device
from zerovision.training.data.class_names import read_class_names
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.loader import Loader, SampleRows
from zerovision.training.data.reader import Batch
from zerovision.training.engines.engine import Loss
from zerovision.training.engines.precision import under_autocast
from zerovision.training.tasks.task import Forward
from zerovision.training.world.collectives import agreed, gather_objects
from zerovision.training.world.world import World

if TYPE_CHECKING:
    from zerovision.training.config import TrainConfig

Outputs = tuple[int, Sequence[Names]]
MOST_KEPT_BYTES = 2 * 10**9  # of the teacher's outputs, on each rank


class Teacher:
    """Maps a batch of the run, with images float32 [B, C, S, S], to the teacher's logits, float32 [B, classes].

    The images are normalized for the student; this class converts them to the teacher's normalization, from `given` to
    `own`, each the mean and standard deviation per channel, float64 [2, C]. The teacher runs in evaluation mode,
    without gradients, so its outputs depend only on the images, and not on the rank. `order`, int64 [classes] on the
    device of the images, is the index of the teacher's output for each class of the data.
    """

    note = ""  # how the run's preprocessing differs from the teacher's

    def __init__(
        self, module: nn.Module, order: torch.Tensor, own: torch.Tensor, given: torch.Tensor, precision: str
    ) -> None:
        digest = hashlib.sha256()
        for name, tensor in sorted(module.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
        self.digest = digest.hexdigest()
        self.kept: torch.Tensor | None = None  # stored outputs for the training images, float32 [N, classes]
        module = module.eval().requires_grad_(False).to(order.device).to(memory_format=torch.channels_last)
        self._network, self._order = under_autocast(module, precision, order.device), order
        factors = torch.stack([given[1] / own[1], (given[0] - own[0]) / own[1]])[:, :, None, None]
        self._normalization = None if torch.equal(own, given) else factors.float().to(order.device)

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the logits for a batch of training images."""
        if self.kept is None:
            return self.answer(batch.images)
        return self.kept.index_select(0, to_device(batch.indices, self.kept.device))

    def keep_answers(self, train: Loader, world: World, forward: Forward, say: Callable[[str], None]) -> int:
        """Compute and store the outputs for all training images, if the images are the same in every epoch.

        See `Task.before_training`. The outputs are stored only if they do not depend on an image's place in the batch,
        so that they have the same bits as outputs computed in each epoch.
        """
        begin, images = time.perf_counter(), len(train.dataset)
        if not train.dataset.is_constant or 4 * len(self._order) * images > MOST_KEPT_BYTES:
            return 0
        rows = SampleRows(train, world)
        answers_to = lambda batches: ((batch, self.answer(batch.images)) for batch in batches)  # noqa: E731
        if stop_signal := forward(answers_to, train.each_once(), rows.add):
            return stop_signal
        first, answers = (part.flip(0) for part in rows.first)
        if all(gather_objects(torch.equal(self.answer(first), answers), world)):
            self.kept = rows.values
            seconds = format_duration(time.perf_counter() - begin)
            say(f"teacher      answered {images} images in {seconds}, for all epochs")
        else:
            say(
                "note: here the last bits of a teacher's outputs depend on an image's place in the batch: they are "
                "computed in every epoch"
            )
        return 0

    @torch.no_grad()
    def answer(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the logits for images, without using stored outputs."""
        if self._normalization is not None:
            scale, offset = self._normalization
            images = images * scale + offset
        return self._network(images).float().index_select(1, self._order)


def load_teacher(config: TrainConfig, data: DatasetPair, precision: str, world: World) -> Teacher:
    """Load the teacher that a configuration names, the same on all ranks, or raise a UserError; a collective."""

    def load() -> Teacher:
        is_of_timm = config.teacher.startswith(TIMM_PREFIX)
        module, outputs, made = _load_timm(config, data) if is_of_timm else _load_file(config)
        here = Preparation.of_run(data.preprocessing)
        own, given = (torch.tensor(each[:2], dtype=torch.float64) for each in (made, here))
        if own.shape != given.shape:
            raise UserError(
                f"--teacher {config.teacher} needs images with {plural(own.shape[1], 'channel')}, not {given.shape[1]}."
            )
        for size in data.train.sizes:
            if failure := forward_failure(module, size, config.micro_batch, data.preprocessing.channels):
                raise UserError(f"--teacher {config.teacher} does not take {size}-pixel images: {one_line(failure)}.")
        order = torch.tensor(_order(config, data, *outputs), device=world.device)
        teacher = Teacher(module, order, own, given, precision)
        if config.teacher_classes:  # a different order of classes makes it a different teacher
            teacher.digest = hashlib.sha256(f"{teacher.digest} {order.tolist()}".encode()).hexdigest()
        teacher.note = differences(made, here, of_arrays=data.train.source.in_memory)
        return teacher

    # One rank per machine loads first, and may download the weights; other ranks then find them in the cache.
    first = agreed(lambda: load() if world.local_rank == 0 else None, world)
    teacher = agreed(lambda: first or load(), world)
    digests = gather_objects(teacher.digest, world)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise AgreedError(f"--teacher {config.teacher} differs between rank {rank} and rank 0: use the same file.")
    return teacher


def distilled(teacher: Callable[[Batch], torch.Tensor], temperature: float, share: float, loss: Loss) -> Loss:
    """Build the divergence from a teacher's softened outputs, mixed with the loss of the labels.

    The divergence is multiplied by the temperature squared, so that the size of the gradient does not depend on the
    temperature (Hinton et al. 2015, https://arxiv.org/abs/1503.02531). The teacher sees exactly the augmented and mixed
    images that the student sees (Beyer et al. 2022, https://arxiv.org/abs/2106.05237), once for all members of an
    ensemble.
    """

    def both(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        told = F.log_softmax(teacher(batch) / temperature, dim=1)

        def of_member(member: torch.Tensor) -> torch.Tensor:
            own = F.log_softmax(member.float() / temperature, dim=1)
            divergence = temperature**2 * F.kl_div(own, told, reduction="none", log_target=True).sum(1)
            return divergence if share == 1 else share * divergence + (1 - share) * loss(member, batch)

        return mean_over_members(of_member, logits)

    return both


def _order(config: TrainConfig, data: DatasetPair, number: int, known: Sequence[Names]) -> list[int]:
    """Return the index, among the teacher's `number` outputs, of each class of the data, or raise a UserError.

    `known` contains lists of the outputs' names: several if outputs have alternative names, none if names are unknown.
    """
    states = "--teacher-classes FILE, the class name of each of its outputs, one per line"
    if config.teacher_classes:
        try:
            text = read_small_text(Path(os.path.expanduser(config.teacher_classes)))
        except (OSError, ValueError) as error:
            raise UserError(f"--teacher-classes {config.teacher_classes} cannot be read: {one_line(error)}.") from None
        known = [read_class_names(text.encode(), config.teacher_classes)]
        if len(known[0]) != number:
            raise UserError(
                f"--teacher-classes {config.teacher_classes} has {plural(len(known[0]), 'line')}, but --teacher "
                f"{config.teacher} has {plural(number, 'output')}: use one line per output."
            )
    if not known:
        raise UserError(
            f"--teacher {config.teacher} has no names for its {number} classes, and an equal number does not mean an "
            f"equal order: use {states}."
        )
    order, missing = order_of(data.class_names, known)
    if missing:
        raise UserError(
            f"--teacher {config.teacher} has no output for {len(missing)} of the {len(data.class_names)} classes, such "
            f"as {shown(missing[0])}; it has classes such as {shown(known[0][0])}: use one that was trained on them, "
            f"or, if only the names differ, {states}."
        )
    return order


def _load_file(config: TrainConfig) -> tuple[nn.Module, Outputs, Preparation]:
    """Return the network of a run or a file, its classes, and its preprocessing."""
    given = Path(os.path.expanduser(config.teacher))
    logs = [Path(folder).expanduser().resolve() / "runs" for folder in (config.log_dir or log_folder(), log_folder())]
    places = [given, *(folder / WEIGHTS for folder in (given, *(log / config.teacher for log in logs)))]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise UserError(
            f"--teacher {config.teacher} is neither a file nor a run with a {WEIGHTS}, here or in {logs[0]}: use "
            "one of these, or timm:NAME."
        )
    module, metadata = load_model(path)
    names = metadata["class_names"]
    return module, (len(names), [names]), Preparation.of_run(metadata["preprocessing"])


def _load_timm(config: TrainConfig, data: DatasetPair) -> tuple[nn.Module, Outputs, Preparation]:
    """Return a timm network with its published weights, its class names, and its preprocessing."""
    try:
        published = published_config(config.teacher.removeprefix(TIMM_PREFIX))
        if not published["num_classes"]:
            raise UserError("it has features and no classes: train a head on it, and use that run")
        settings = RunSettings(model_type=config.teacher, pretrained=True, stem="keep")
        made_for = data.preprocessing
        built = build_model(settings, published["num_classes"], made_for.image_size, made_for.channels)
    except UserError as error:  # its advice to type --weights applies only to the model of a run
        raise UserError(f"--teacher {config.teacher}: {str(error).partition(' Type --weights')[0]}") from error
    made = Preparation.of_timm(published)
    if data.preprocessing.channels != 3:
        made = made._replace(mean=data.preprocessing.mean, std=data.preprocessing.std)
    return built.module, (published["num_classes"], published_classes(published)), made
