"""Floating-point operations of a model, counted once."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from models.dry_run import training_flops, without_data


class TrainingFlops:
    """Counts the operations of training on one image when first asked, in some 0.1 s; see `training_flops`."""

    def __init__(self, module: nn.Module, image_size: int) -> None:
        """Copy the shapes of a module, see `without_data`, for images of `image_size` pixels."""
        self._module, self._image_size = without_data(module), image_size

    @cached_property
    def per_image(self) -> int | None:
        """Operations of forward and backward for one image, None if the model cannot be run without data."""
        return training_flops(self._module, self._image_size)
