"""The interface of a task, which is what a network learns; each task except the usual one has a folder here.

`settings.TASKS` is the table of tasks; a new task needs a folder here and a line in that table.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from zerovision.training.base.errors import UserError
from zerovision.training.base.settings import Mode
from zerovision.training.engines.ways import OF_CLASSES
from zerovision.training.tasks.class_weights import given_weights

if TYPE_CHECKING:
    import numpy as np
    import torch

    from zerovision.training.base.leaves import Leaves
    from zerovision.training.data.datasets import DatasetPair
    from zerovision.training.data.loader import Loader
    from zerovision.training.engines.engine import Loss, Step
    from zerovision.training.tasks.labels import OneLabel
    from zerovision.training.tasks.scores import SampleRecorder
    from zerovision.training.world.world import World

Forward = Callable[..., int]
"""`zerovision.training.loop.forward_all` with its fixed arguments set: a collective, which a signal may end."""


class Task(Mode):
    """What a network learns: in this class, one class per image; other tasks override what differs.

    Attributes:
        views: minimum number of times that each image occurs in a step.
        embedding: number of outputs per image of a network that learns embeddings by comparing all images of a step,
            which may pass through the network twice; 0 for a classifier.
        needs_images: whether the loss needs the images of a batch, and not only the outputs for them and the labels.
        has_thresholds: whether the best weights are stored with the lowest probability at which to predict each class.
        labels: import path of the subclass of `OneLabel` that turns the network's outputs into predictions and scores.
        usual: the defaults of the settings whose default is different in this task.
        loss_scale: size of the training loss relative to cross-entropy.
        identity: what a checkpoint and the run that resumes from it must have in common, besides the recipe.
        data: the run's data.
        world: the ranks.
        keeps_probabilities: whether an evaluation keeps all probabilities; see `SampleRecorder`.
    """

    flag = "loss"
    views: ClassVar[int] = 1
    embedding: ClassVar[int] = 0
    needs_images: ClassVar[bool] = False
    has_thresholds: ClassVar[bool] = False
    labels: ClassVar[str] = "zerovision.training.tasks.labels:OneLabel"
    usual: ClassVar[dict[str, Any]] = {}
    loss_scale = 1.0

    # Methods that need only the settings.

    def is_asked(self) -> bool:
        return True

    def mistakes(self, label_of: Mapping[str, str]) -> Iterator[str]:
        config, of = self.config, label_of
        given_weights(config.class_weights)
        if config.learning_rate == "auto" and config.loss not in OF_CLASSES:
            loss = f"{of['loss']} {config.loss}"
            yield f"{loss} cannot be combined with {of['learning_rate']} auto: use a number, or another loss."
        if config.class_weights != "none" and config.sampling == "balanced":
            both = f"{of['class_weights']} and {of['sampling']} balanced"
            yield f"{both} both compensate for rare classes: use only one of them."

    def chunks(self) -> dict[str, int]:
        """Return the name and value of the setting that limits the images per pass through the network, if in use."""
        return {}

    # Methods that need a run.

    def prepare(self, data: DatasetPair, precision: str, world: World) -> None:
        """Prepare the task for the data of a run; a collective.

        Raises:
            UserError: on all ranks, if the task cannot be learned from this data.
        """
        from zerovision.training.tasks.scores import check_best_by
        from zerovision.training.world.collectives import agreed

        self.data, self.world, config = data, world, self.config
        self.identity: dict[str, str] = {}

        def check() -> bool:
            if data.train.source.loss_weights is not None and (self.embedding or config.mixup or config.cutmix):
                cause = f"--loss {config.loss}" if self.embedding else "--mixup and --cutmix"
                raise UserError(
                    f"--data {config.data}: {cause} cannot weight individual images: leave out the column weight."
                )
            return check_best_by(config.best_by, data, config.micro_batch, world.data.size)

        self.keeps_probabilities = agreed(check, world)

    def step(self, leaves: Leaves, of_losses: Callable[[Loss], Step]) -> Step:
        """Return the function that performs a training step.

        Args:
            leaves: the step's leaves.
            of_losses: function that turns a loss per image into a step function.

        Raises:
            UserError: if the settings do not fit the data.
        """
        return of_losses(self._build_loss())

    def _build_loss(self, **parts: Any) -> Loss:
        from zerovision.training.tasks.labels import build_loss

        return build_loss(self.config, self.data.class_names, self.data.train_counts, self.world.device, **parts)

    def readers(self, build: Callable[..., tuple[Loader, Loader]]) -> tuple[Loader, Loader]:
        """Return the training and validation loaders, built by `build`, which accepts additional sets to read."""
        return build()

    def notes(self, weights: str) -> list[str]:
        """Return notes about properties of the weights in the file `weights` that users may not expect."""
        return []

    def before_training(self, train: Loader, forward: Forward, say: Callable[[str], None]) -> int:
        """Do one-time work before training; return the signal that interrupted this work, or 0; a collective.

        This is called only if there are steps left to train.
        """
        return 0

    def classifier(self, forward: Forward) -> tuple[int, Callable[[torch.Tensor], torch.Tensor]]:
        """Return a signal like `before_training`, and a function that maps the network's outputs to logits [B, C].

        This is a collective.
        """
        return 0, lambda outputs: outputs

    def recorder(self, thresholds: np.ndarray | None = None) -> SampleRecorder:
        """Return a recorder for the scores of an evaluation; for `thresholds`, see `OneLabel`."""
        kind, targets = pkgutil.resolve_name(self.labels), self.data.label_targets(self.world.device)
        labels: OneLabel = kind(len(self.data.class_names), thresholds, targets)
        return labels.recorder(keeps_probabilities=self.keeps_probabilities)
