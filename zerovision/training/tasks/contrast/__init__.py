"""Learns features by comparison: views of one image, and images of one class, are trained to have similar features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from zerovision.models import model_spec
from zerovision.training.base.settings import LARGEST_BATCH, Values, option
from zerovision.training.engines.ways import NOT_COMPILED, OUR_ENGINE
from zerovision.training.tasks.task import Forward, Task

if TYPE_CHECKING:
    import torch

    from zerovision.training.base.leaves import Leaves
    from zerovision.training.data.loader import Loader
    from zerovision.training.engines.engine import Loss, Step


@dataclass(frozen=True)
class ContrastSettings:
    """The settings for the comparison of images."""

    temperature: float = option(0.1, "Divisor of the cosine similarities.", low=0.001, high=100, part_of="loss:supcon")
    gradient_cache: int = option(
        0,
        "Images to pass through the network at a time; the loss still compares all images of a step; 0: --batch-size.",
        low=0,
        high=LARGEST_BATCH,
        part_of="loss:supcon",
    )


class Contrastive(Task):
    """Learns features that are similar within a class, without a classifier; a head can be trained on them later."""

    goes_with: ClassVar[Values] = {
        **{"mixup": (0,), "cutmix": (0,), "class_weights": ("none",)},
        **{"engine": OUR_ENGINE, "compile": NOT_COMPILED},
    }
    resumable = ("gradient_cache",)
    views = 2  # each image is also compared with a second augmentation of itself
    embedding = 128  # outputs of the projection, as in Khosla et al.

    def is_asked(self) -> bool:
        return self.config.loss == "supcon"

    def mistakes(self, label_of: Mapping[str, str]) -> Iterator[str]:
        config, of = self.config, label_of
        cache, loss = (f"{of[name]} {getattr(config, name)}" for name in ("gradient_cache", "loss"))
        if config.gradient_cache and config.batch_size == "auto":
            yield f"{cache} already sets the number of images per forward pass: use a number for {of['batch_size']}."
        if self.is_asked() and model_spec(config.model_type).takes_members:
            yield f"{loss} does not support ensembles, whose members share no features: train each member separately."

    def chunks(self) -> dict[str, int]:
        return {"gradient_cache": self.config.gradient_cache} if self.config.gradient_cache else {}

    def step(self, leaves: Leaves, of_losses: Callable[[Loss], Step]) -> Step:
        from zerovision.training.tasks.contrast.comparison import GradientCache

        return GradientCache(self.world.data, leaves, self.config.temperature, len(self.data.class_names))

    def readers(self, build: Callable[..., tuple[Loader, Loader]]) -> tuple[Loader, Loader]:
        """See `Task`; also loads training images without augmentation, whose features are used to classify images."""
        from zerovision.training.data.datasets import ImageDataset
        from zerovision.training.data.loader import Loader
        from zerovision.training.data.sampler import EvaluationPlan
        from zerovision.training.tasks.nearest import MOST_COMPARED

        images = ImageDataset(self.data.train.source, self.data.preprocessing, most_bad=self.data.train.most_bad)
        train, val = build([images])
        self._stride, world = -(-len(images) // MOST_COMPARED), self.world
        plan = EvaluationPlan(-(-len(images) // self._stride), self.config.micro_batch, world.data.size, self._stride)
        self._compared = Loader(images, plan, world.data.rank, workers=train.pool or 0, device=world.device)
        return train, val

    def classifier(self, forward: Forward) -> tuple[int, Callable[[torch.Tensor], torch.Tensor]]:
        import torch.nn.functional as F

        from zerovision.training.data.loader import SampleRows
        from zerovision.training.tasks.nearest import log_votes

        rows = SampleRows(self._compared, self.world.data, self._stride)
        signal = forward(self._compared, rows.add)
        is_read = rows.weights > 0
        bank = F.normalize(rows.values[is_read.to(rows.values.device)].float())
        classes, labels = len(self.data.class_names), rows.labels[is_read].to(bank.device)
        return signal, lambda outputs: log_votes(outputs, bank, labels, classes)

    def notes(self, weights: str) -> list[str]:
        from zerovision.training.tasks.nearest import NEIGHBOURS

        return [
            f"top-1 is that of the {NEIGHBOURS} nearest training images, because --loss {self.config.loss} trains no "
            f"classifier: train one later with --weights {weights} --tune head"
        ]
