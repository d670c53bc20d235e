"""Undoes steps with a non-finite gradient on all ranks, counts them, and logs the names of their samples.

The engine does not apply an update if the global gradient norm is not finite (one NaN in one image on one rank is
enough). By then, the forward pass has already updated BatchNorm's statistics, so this module restores them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerovision.training.base.errors import TOO_MANY_BAD_STEPS_EXIT_CODE, RunEnded
from zerovision.training.base.points import Loggers
from zerovision.training.checkpoint.store import TrainState
from zerovision.training.engines.precision import DynamicLossScale
from zerovision.training.observe.observer import Observer, Seen, StepDone
from zerovision.training.world.collectives import gather_objects, largest_over_ranks
from zerovision.training.world.world import World

NAMES_IN_MESSAGE = 4


class _Evidence(NamedTuple):
    """Numbers that show which samples of a micro-batch are finite, kept instead of its images."""

    indices: torch.Tensor  # int64 [B], on the CPU
    image_sums: torch.Tensor  # [B], on the device; the sum of an image is finite if all its values are
    losses: torch.Tensor  # [B], on the device: `Seen.evidence`


class _PendingStep(NamedTuple):
    """A step whose outcome, the bool tensor `applied` [], has not yet been read from the device."""

    step: int
    applied: torch.Tensor
    evidence: list[_Evidence]


class _Cause(NamedTuple):
    """What one rank found in a skipped step: whether losses were finite, what was not finite, and the sample names."""

    losses_finite: bool
    culprit: str
    names: list[str]


class NonFiniteGuard(Observer):
    """Undoes and counts the steps that the engine skipped, and ends the run after too many consecutive ones.

    If groups of ranks decide separately, each learns about the other groups' decisions in `settle`. The ranks of
    `world` read different images. With 0 for `most_consecutive`, there is no limit. `name_of` returns the path of the
    sample with this index in the training set.
    """

    def __init__(
        self, state: TrainState, world: World, loggers: Loggers, most_consecutive: int, name_of: Callable[[int], str]
    ) -> None:
        self._state, self._world, self._loggers = state, world, loggers
        self._most_consecutive, self._name_of = most_consecutive, name_of
        self._buffers = state.engine.buffers
        self._kept: list[torch.Tensor] = []
        self._evidence: list[_Evidence] = []
        self._pending: list[_PendingStep] = []

    def before_step(self, position: int) -> None:
        """Copy the values that a skipped step must not change."""
        self._kept = self._buffers.copy()
        self._evidence = []

    def seen(self, seen: Seen) -> None:
        """Keep the evidence of a micro-batch until the step's outcome is read, without a sync."""
        images = seen.batch.images
        sums = images.sum(tuple(range(1, images.ndim)))
        self._evidence.append(_Evidence(seen.batch.indices, sums, seen.evidence.detach()))

    def after_step(self, done: StepDone) -> None:
        """Undo the step if it was skipped; a collective for a skipped step.

        If the outcome is still on the device, the step is undone there without a sync, and the next `settle` counts and
        logs the step. Too many consecutive skipped steps raise RunEnded on all ranks.
        """
        step, applied = done.position + 1, done.applied
        if self._state.engine.group:  # the other groups receive it in `settle`
            applied = torch.as_tensor(applied, device=self._world.device)
        if isinstance(applied, torch.Tensor):
            self._buffers.restore(self._kept, unless=applied)
            self._pending.append(_PendingStep(step, applied, self._evidence))
        elif applied:
            self._count(bad_steps_in_row=0)
        else:
            self._buffers.restore(self._kept)
            self._count_skipped(step, self._evidence)

    def after_steps(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Read the outcomes that are still on the device, with a sync.

        A step is counted as skipped if any group skipped it. This is a collective if a step was skipped, or if there
        are groups.

        Raises:
            RunEnded: see `after_step`.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        skipped = ~torch.stack([one.applied for one in pending])
        skipped_anywhere = largest_over_ranks(skipped.int(), self._world) if self._state.engine.group else skipped
        for (step, _, evidence), is_own, is_skipped in zip(
            pending, skipped.tolist(), skipped_anywhere.tolist(), strict=True
        ):
            if is_skipped:
                self._count_skipped(step, evidence if is_own else [])
            else:
                self._count(bad_steps_in_row=0)

    def _count(self, **counts: int) -> None:
        self._state.progress = dataclasses.replace(self._state.progress, **counts)

    def _count_skipped(self, step: int, evidence: list[_Evidence]) -> None:
        """Count and log a skipped step, and end the run after too many; a collective."""
        cause = self._find_cause(evidence)
        causes = [_Cause(*row) for row in gather_objects(cause, self._world)]
        scale, progress = self._state.engine.loss_scale, self._state.progress
        self._count(skipped_steps=progress.skipped_steps + 1)
        can_be_halved = scale is not None and scale.value > DynamicLossScale.MINIMUM
        if can_be_halved and all(cause.losses_finite for cause in causes):
            return  # fp16's loss scale was merely too large
        consecutive = progress.bad_steps_in_row + 1
        self._count(bad_steps_in_row=consecutive)
        rank, worst = min(enumerate(causes), key=lambda item: (item[1].losses_finite, not item[1].names))
        if self._world.group:  # of a mesh: the first of the ranks that read these images
            rank = dist.get_global_rank(self._world.group, rank)
        group = self._state.engine.group
        skipped = f"skipped on the {group} of rank {rank} (" if group else "skipped on all ranks ("
        shown = ", ".join(worst.names[:NAMES_IN_MESSAGE])
        more = f" and {len(worst.names) - NAMES_IN_MESSAGE} more" if len(worst.names) > NAMES_IN_MESSAGE else ""
        self._loggers.message(
            f"step {step} {skipped}{consecutive} in a row): {worst.culprit} is not finite "
            f"on rank {rank}, samples {shown}{more}"
        )
        names = [name for cause in causes if cause.losses_finite == worst.losses_finite for name in cause.names]
        self._loggers.event(
            "skipped_step", {"step": step, "in_row": consecutive, "culprit": worst.culprit, "samples": names}
        )
        if 0 < self._most_consecutive <= consecutive:
            raise RunEnded(
                f"{consecutive} steps in a row were skipped because the gradient was not finite (--max-bad-steps):"
                " look at the samples named in the log, lower --learning-rate, or resume from an earlier checkpoint.",
                TOO_MANY_BAD_STEPS_EXIT_CODE,
                step,
            )

    def _find_cause(self, evidence: list[_Evidence]) -> _Cause:
        """Return this rank's cause: a non-finite image, otherwise a non-finite loss, otherwise the step's gradient."""
        indices = [index for one in evidence for index in one.indices.tolist()]
        images_ok = [is_finite for one in evidence for is_finite in one.image_sums.isfinite().tolist()]
        losses_ok = [is_finite for one in evidence for is_finite in one.losses.isfinite().tolist()]
        culprit, found = "the gradient", indices
        for what, are_ok in (("the loss", losses_ok), ("an image", images_ok)):
            if not all(are_ok):
                culprit, found = what, [index for index, is_ok in zip(indices, are_ok, strict=True) if not is_ok]
        return _Cause(all(losses_ok), culprit, [self._name_of(index) for index in found])
