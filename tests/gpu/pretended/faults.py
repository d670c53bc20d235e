"""Faults to plant into a training, so that the checks can be seen to find them; no file of the project is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import zerovision.training.data.loader
from tests.gpu.pretended.garbage import replace
from zerovision.training.engines.engine import TimedEngine


def item_in_the_step() -> None:
    """Read the loss in each step, which waits for it."""

    def reading(backward: Callable[..., None]) -> Callable[..., None]:
        def read(engine: TimedEngine, loss: torch.Tensor) -> None:
            loss.item()
            backward(engine, loss)

        return read

    replace(TimedEngine, "backward", reading)


def copy_that_is_not_pinned() -> None:
    """Copy batches from pageable memory: `non_blocking` keeps PyTorch silent, and yet the driver holds up the host."""
    replace(
        zerovision.training.data.loader,
        "to_device",
        lambda _: lambda tensor, device: tensor.to(device, non_blocking=True),
    )


def labels_on_the_cpu() -> None:
    """Leave the labels where they were read."""
    _change_batches(lambda before, after: dataclasses.replace(after, labels=before.labels))


def labels_of_32_bits() -> None:
    """Give the loss labels of a dtype that it does not take."""
    _change_batches(lambda before, after: dataclasses.replace(after, labels=after.labels.int()))


def _change_batches(change: Callable[[Any, Any], Any]) -> None:
    def changing(transformed: Callable[..., Any]) -> Callable[..., Any]:
        return lambda batch, *others: change(batch, transformed(batch, *others))

    replace(zerovision.training.data.loader, "_transformed", changing)


FAULTS: dict[str, Callable[[], None]] = {
    plant.__name__: plant for plant in (item_in_the_step, copy_that_is_not_pinned, labels_on_the_cpu, labels_of_32_bits)
}
