"""Steps whose gradient is not finite: undone on all ranks, counted, and logged with the names of the samples.

The engine does not apply an update where the global gradient norm is not finite, on any rank's account (one NaN in one
image of one rank suffices). The forward pass has touched BatchNorm's statistics by then: they are set back here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from training.data.reader import Batch
from training.errors import TOO_MANY_BAD_STEPS_EXIT_CODE, RunEnded
from training.observe.loggers import Loggers
from training.parallel.batchnorm import ModelBuffers
from training.parallel.collectives import gather_objects
from training.parallel.engine import Engine, StepResult
from training.parallel.exchange import flag, list_of, row_of, text
from training.parallel.precision import DynamicLossScale
from training.parallel.world import World

NAMES_IN_MESSAGE = 4


class _Evidence(NamedTuple):
    """What says which samples of a micro-batch are finite, without its images.

    Attributes:
        indices: int64 [B] on the CPU.
        image_sums: [B] on the device; the sum of an image's values is finite if they are.
        losses: [B] on the device.
    """

    indices: torch.Tensor
    image_sums: torch.Tensor
    losses: torch.Tensor


class _Verdict(NamedTuple):
    """A step of which the device has not said yet whether it was applied: its number, a bool [], the evidence."""

    step: int
    applied: torch.Tensor
    evidence: list[_Evidence]


class _Blame(NamedTuple):
    """What one rank knows of a bad step: whether its losses were finite, what was not, in which samples."""

    losses_finite: bool
    culprit: str
    names: list[str]


class NonFiniteGuard:
    """Undoes steps that the engine skipped, and ends a run in which nothing else happens.

    Args:
        engine: the engine.
        world: the ranks.
        loggers: where a skipped step is told.
        most_in_row: skipped steps in a row that end the run, 0 for no limit.
        name_of: the path of a sample by its index in the training set.
        skipped: steps skipped before a resume.
        in_row: how many of them were the latest steps.
    """

    def __init__(
        self,
        engine: Engine,
        world: World,
        loggers: Loggers,
        most_in_row: int,
        name_of: Callable[[int], str],
        skipped: int = 0,
        in_row: int = 0,
    ) -> None:
        self._engine, self._world, self._loggers = engine, world, loggers
        self._most_in_row, self._name_of = most_in_row, name_of
        self._buffers = ModelBuffers(engine.module)
        self._kept: list[torch.Tensor] = []
        self._evidence: list[_Evidence] = []
        self._pending: list[_Verdict] = []
        self.skipped, self.in_row = skipped, in_row

    def before_step(self) -> None:
        """Keep what a skipped step must not change."""
        self._kept = self._buffers.copy()
        self._evidence = []

    def note(self, batch: Batch, losses: torch.Tensor) -> None:
        """Keep the losses [B] of a micro-batch and one number of each image until the verdict; nothing is read back."""
        self._evidence.append(_Evidence(batch.indices, batch.images.sum((1, 2, 3)), losses.detach()))

    def after_step(self, result: StepResult | None, step: int) -> bool | torch.Tensor:
        """Undo the step where it was skipped, and return whether it was applied; a collective where it was not.

        Where the device has not said so yet, nothing is waited for: the step is undone on the device, and counted,
        told and judged by the next `settle`.

        Args:
            result: what the engine did.
            step: the run's step, from 1, for the message.

        Raises:
            RunEnded: on all ranks, after too many bad steps in a row.
        """
        if result is not None and isinstance(result.applied, torch.Tensor):
            self._buffers.restore_unless(result.applied, self._kept)
            self._pending.append(_Verdict(step, result.applied, self._evidence))
            return result.applied
        if result is None or result.applied:
            self.in_row = 0
            return True
        self._buffers.restore(self._kept)
        self._count_skipped(step, self._evidence)
        return False

    def settle(self) -> None:
        """Read the verdicts that are still on the device: a sync; a collective where a step was skipped.

        Raises:
            RunEnded: as `after_step`.
        """
        pending, self._pending = self._pending, []
        verdicts = torch.stack([verdict.applied for verdict in pending]).tolist() if pending else []
        for verdict, applied in zip(pending, verdicts, strict=True):
            if applied:
                self.in_row = 0
            else:
                self._count_skipped(verdict.step, verdict.evidence)

    def _count_skipped(self, step: int, evidence: list[_Evidence]) -> None:
        """Count and tell a skipped step, and end the run after too many; a collective."""
        self.skipped += 1
        rows = gather_objects(self._blame(evidence), row_of(flag, text, list_of(text)), self._world)
        blames = [_Blame(*row) for row in rows]
        if self._is_loss_scale_search(blames):
            return
        self.in_row += 1
        rank, worst = min(enumerate(blames), key=lambda item: (item[1].losses_finite, not item[1].names))
        shown = ", ".join(worst.names[:NAMES_IN_MESSAGE])
        more = f" and {len(worst.names) - NAMES_IN_MESSAGE} more" if len(worst.names) > NAMES_IN_MESSAGE else ""
        self._loggers.message(
            f"step {step} skipped on all ranks ({self.in_row} in a row): {worst.culprit} is not finite on rank {rank}, "
            f"samples {shown}{more}"
        )
        names = [name for blame in blames if blame.losses_finite == worst.losses_finite for name in blame.names]
        self._loggers.event(
            "skipped_step", {"step": step, "in_row": self.in_row, "culprit": worst.culprit, "samples": names}
        )
        if 0 < self._most_in_row <= self.in_row:
            raise RunEnded(
                f"{self.in_row} steps in a row were skipped because the gradient was not finite (--max-bad-steps): "
                "look at the samples named in the log, lower --learning-rate, or resume from an earlier checkpoint.",
                TOO_MANY_BAD_STEPS_EXIT_CODE,
                step,
            )

    def _is_loss_scale_search(self, blames: list[_Blame]) -> bool:
        """Say whether fp16's loss scale was merely too large, which halving it cures."""
        scale = self._engine.loss_scale
        can_be_halved = scale is not None and scale.value > DynamicLossScale.MINIMUM
        return can_be_halved and all(blame.losses_finite for blame in blames)

    def _blame(self, evidence: list[_Evidence]) -> _Blame:
        """Find what this rank contributed: a broken image first, then losses, else the gradient of the whole step."""
        images, losses, step = [], [], []
        for indices, image_sums, micro_losses in evidence:
            for index, image_ok, loss_ok in zip(
                indices.tolist(), image_sums.isfinite().tolist(), micro_losses.isfinite().tolist(), strict=True
            ):
                step.append(index)
                if not image_ok:
                    images.append(index)
                if not loss_ok:
                    losses.append(index)
        culprit, found = next(
            (what, found)
            for what, found in (("an image", images), ("the loss", losses), ("the gradient", step))
            if found or what == "the gradient"
        )
        return _Blame(not losses, culprit, [self._name_of(index) for index in found])
