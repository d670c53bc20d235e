"""A model's buffers, mostly BatchNorm's running statistics, across leaves and ranks.

PyTorch's engine keeps one version of the buffers per leaf; other engines keep one per rank, and neither broadcast nor
average the buffers. All versions are averaged before every evaluation, so that the reported accuracy matches the saved
weights file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from zerovision.training.base.leaves import Leaves
from zerovision.training.world.collectives import gather_rows
from zerovision.training.world.world import World

ONE_LEAF = Leaves(1, 1)
AVERAGE = "average/"  # prefix of a running average's name


@contextmanager
def undone(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore a module's buffers and mode, and the random generators, even if the block raises an error."""
    kept, was_training = [buffer.clone() for buffer in module.buffers()], module.training
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        module.train(was_training)
        with torch.no_grad():
            for buffer, values in zip(module.buffers(), kept, strict=True):
                buffer.copy_(values)


class ModelBuffers:
    """All buffers of a model, such as BatchNorm's statistics, with a version for each leaf that this rank computes.

    The module computes with the selected version. Its buffers become views of one flat tensor per dtype: copying
    mobilenet's 138 buffers one by one takes as long as an optimizer step. The buffers keep their names, and modules
    still update them in place. All versions are equal at first, and each may also have a running average. The buffers'
    `device` may differ from the parameters' device; None is the CPU.
    """

    ALIGNMENT = 32  # in elements, as for separate tensors

    def __init__(self, module: nn.Module, leaves: Leaves = ONE_LEAF, device: torch.device | None = None) -> None:
        versions, self._leaves = leaves.per_rank, leaves
        self._selected = 0
        self._live: list[torch.Tensor] = []  # [n] per dtype; the module's buffers are views of these
        self._rows: list[torch.Tensor] = []  # [versions, n]; the selected row is up to date after `_store`
        self._averages: list[torch.Tensor] = []  # laid out like the rows
        self._places: list[dict[str, tuple[int, torch.Size]]] = []  # start and shape of each dtype's buffers
        by_dtype: dict[torch.dtype, dict[str, torch.Tensor]] = {}
        for name, buffer in module.named_buffers():
            if not buffer.is_meta:  # otherwise, the buffer is in another rank's stage
                by_dtype.setdefault(buffer.dtype, {})[name] = buffer
        for dtype, buffers in by_dtype.items():
            places, size = dict[str, tuple[int, torch.Size]](), 0
            for name, buffer in buffers.items():
                places[name] = size, buffer.shape
                size += -(-buffer.numel() // self.ALIGNMENT) * self.ALIGNMENT
            live = torch.zeros(size, dtype=dtype, device=device)
            for name, buffer in buffers.items():
                start, shape = places[name]
                buffer.data = live[start : start + buffer.numel()].view(shape).copy_(buffer)
            self._places.append(places)
            self._live.append(live)
            self._rows.append(live[None] if versions == 1 else live.repeat(versions, 1))
        self._by_name = self._views(self._rows)

    def select(self, version: int) -> None:
        """Make the module use this version."""
        if version != self._selected:
            self._store()
            self._selected = version
            self._load()

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return views of all buffers [versions, ...], by name; the views are valid until the module's next forward.

        The names of averages begin with `AVERAGE`.
        """
        self._store()
        return self._by_name

    @torch.no_grad()
    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set all buffers to these values, [versions, ...] by name."""
        for name, buffer in self._by_name.items():
            buffer.copy_(values[name])
        self._load()

    def copy(self) -> list[torch.Tensor]:
        """Return copies of all versions, for `restore`."""
        self._store()
        return [rows.clone() for rows in self._rows]

    def restore(self, copies: list[torch.Tensor], unless: torch.Tensor | None = None) -> None:
        """Set all versions to the result of `copy`, without a sync, unless the bool tensor `unless` [] is true."""
        self._store()
        for rows, kept in zip(self._rows, copies, strict=True):
            rows.copy_(kept if unless is None else torch.where(unless, rows, kept))
        self._load()

    def keep_averages(self) -> None:
        """Start running averages from the current buffers."""
        self._averages = self.copy()
        self._by_name |= {AVERAGE + name: view for name, view in self._views(self._averages).items()}

    @torch.no_grad()
    def update_averages(self, weight: float | torch.Tensor) -> None:
        """Move the averages toward the buffers by the fraction `weight`; integers, which are counts, are copied."""
        self._store()
        for average, rows in zip(self._averages, self._rows, strict=True):
            if rows.is_floating_point():
                average.lerp_(rows, weight)
            else:
                average.copy_(rows)

    @contextmanager
    def averages_in_use(self) -> Iterator[None]:
        """Make the module use the averages inside the block."""
        self._store()
        kept = [live.clone() for live in self._live]
        for live, average in zip(self._live, self._averages, strict=True):
            live.copy_(average[self._selected])
        yield
        for live, values in zip(self._live, kept, strict=True):
            live.copy_(values)

    @torch.no_grad()
    def average(self, world: World) -> int:
        """Replace every floating-point buffer and running average with its mean over all leaves; a collective.

        Versions are added in the order of the leaves, so that the result does not depend on the number of ranks. Values
        that are equal in all versions, such as the statistics of frozen layers, are not changed, because rounding could
        make the mean of three equal numbers a different number.

        Returns:
            The number of bytes that this rank sends.
        """
        self._store()
        sent_bytes = 0
        for rows in (*self._rows, *self._averages):
            if rows.is_floating_point():
                sent_bytes += (world.size - 1) * rows.nbytes
                # If groups of ranks have their own leaves, the world has more ranks than `self._leaves`.
                order = self._leaves._replace(ranks=world.size).order()
                every = gather_rows(rows.reshape(-1), world).view(-1, rows.shape[1])[order]
                mean = every[0].clone()
                for row in every[1:]:
                    mean += row
                rows.copy_(torch.where((every == every[0]).all(0), every[0], mean.div_(len(every))))
        self._load()
        return sent_bytes

    def _views(self, every: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the buffers [versions, ...] by name, as views of tensors that are laid out like the rows."""
        return {
            name: rows[:, start : start + shape.numel()].view(len(rows), *shape)
            for rows, places in zip(every, self._places, strict=True)
            for name, (start, shape) in places.items()
        }

    def _store(self) -> None:
        """Copy the module's current values into the selected version; a single version is used directly."""
        for live, rows in zip(self._live, self._rows, strict=True):
            if len(rows) > 1:
                rows[self._selected].copy_(live)

    def _load(self) -> None:
        """Copy the current values of the selected version into the module."""
        for live, rows in zip(self._live, self._rows, strict=True):
            if len(rows) > 1:
                live.copy_(rows[self._selected])
