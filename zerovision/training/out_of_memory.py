"""Recognizes out-of-memory errors, and chooses the next configuration that needs less memory.

This module does not import torch, because launchers also use it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zerovision.training.base.errors import UserError, one_line
from zerovision.training.base.settings import FEWEST_IMAGES
from zerovision.training.base.units import plural
from zerovision.training.config import FIELDS, FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.config.values import word_of
from zerovision.training.engines.ways import STRATEGIES
from zerovision.training.tasks.settings import asked_task

# Messages of errors other than MemoryError: from PyTorch's allocators on GPUs and CPUs, from libraries, and ENOMEM.
# oneDNN cannot "create a primitive" when no memory is left for the code that it generates.
SIGNS = re.compile(
    r"out of memory|can't allocate memory|Cannot allocate memory|not enough memory|bad_alloc|ALLOC_FAILED"
    r"|could not create a (memory object|primitive(?! descriptor))"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that this process could not allocate memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, (RuntimeError, OSError)) and SIGNS.search(str(error)) is not None
    )


def describe_failure(error: BaseException, rank: int) -> str:
    """Return one line for an exception that satisfies `is_out_of_memory`."""
    return f"rank {rank} ran out of memory: {one_line(error, 160) or type(error).__name__}"


class Rung(NamedTuple):
    """A step down the ladder of configurations that run the same training in less memory.

    Attributes:
        changes: new values of fields of `TrainConfig`, by name.
        cost: what the change saves, and what it costs.
        batchnorm_images: number of images from which BatchNorm computes its statistics after the change; 0 if the
            number stays the same.
        start: the configuration before the change.
    """

    changes: dict[str, Any]
    cost: str
    batchnorm_images: int = 0
    start: TrainConfig = TrainConfig()

    @property
    def flags(self) -> list[str]:
        """The changes as flags of the trainer."""
        wholes = dict.fromkeys(FIELDS[name].metadata["part_of"][0] or name for name in self.changes)
        return [f"{FLAG_OF[name]}={word_of(vars(self.start) | self.changes, name)}" for name in wholes]

    def describe(self, *, has_batchnorm: bool | None = None) -> str:
        """Return the flags and their cost, for messages; `has_batchnorm` is None if unknown."""
        text = f"{' '.join(self.flags)}: {self.cost}"
        if self.batchnorm_images and has_batchnorm is not False:
            text += f"; BatchNorm{'' if has_batchnorm else ', if there is any,'} sees {self.batchnorm_images} at a time"
        return text


def next_rung(config: TrainConfig, ranks: int, *, has_gpus: bool) -> Rung | None:
    """Return the cheapest change to a configuration that saves memory, or None if no such change is left.

    Args:
        config: settings of the run that ran out of memory.
        ranks: number of ranks of the run.
        has_gpus: whether the ranks use GPUs. Sharding helps CPU ranks little, because most of them share the memory of
            one machine.
    """
    for propose in _LADDER:
        for rung in propose(config, ranks, has_gpus):
            try:
                check_config(dataclasses.replace(config, **rung.changes), FLAG_OF)
            except UserError:  # such as an optimizer that only one strategy supports
                continue
            return rung._replace(start=config)
    return None


def advise(config: TrainConfig, ranks: int, *, has_gpus: bool) -> str:
    """Return advice for a user whose configuration ran out of memory."""
    rung = next_rung(config, ranks, has_gpus=has_gpus)
    if rung is None:
        return "no setting is left that would save memory: use a smaller --image-size or model, or more ranks"
    automatic = " (--on-oom adapt does this for you)" if config.on_oom == "stop" else ""
    return f"next to try: {rung.describe()}{automatic}"


def _halve(config: TrainConfig, fewest: int) -> Iterator[Rung]:
    if config.batch_size == "auto":  # the ranks found the largest size that fits, or that 8 images do not fit
        return
    half, steps = config.batch_size // 2, 2 * config.gradient_accumulation_steps
    if config.batch_size % 2 or half < fewest or steps > FIELDS["gradient_accumulation_steps"].metadata["high"]:
        return
    yield Rung(
        {"batch_size": half}
        | ({} if config.global_batch else {"gradient_accumulation_steps": steps})
        | dict.fromkeys(asked_task(config).chunks(), half),
        f"half the activations, {plural(half, 'image')} at a time; global batch and learning rate stay the same",
        batchnorm_images=half,
    )


def _recompute(config: TrainConfig, ranks: int, has_gpus: bool) -> Iterator[Rung]:
    if not config.activation_checkpointing and config.compile != "on":  # the two exclude each other
        yield Rung({"activation_checkpointing": True}, "recomputes activations in backward, about a third more time")


def _shard(config: TrainConfig, ranks: int, has_gpus: bool) -> Iterator[Rung]:
    """Propose the next ZeRO stage; for its communication, see Rajbhandari et al. 2020 (arXiv:1910.02054, section 7)."""
    if ranks == 1 or config.has_own_sharding or not (has_gpus or config.engine != "auto"):
        return
    costs = {2: "shards gradients, communicates as much as ddp", 3: "shards weights too, with half more communication"}
    for strategy, plan in STRATEGIES.items():
        if plan.zero_stage == STRATEGIES[config.strategy].zero_stage + 1:
            yield Rung({"strategy": strategy}, costs[plan.zero_stage])


def _offload(config: TrainConfig, ranks: int, has_gpus: bool) -> Iterator[Rung]:
    if not has_gpus or config.has_own_sharding:
        return
    kinds = ("none", "optimizer", "all")
    for kind in kinds[kinds.index(config.offload) + 1 :]:
        whats = {"optimizer": "the optimizer's state is", "all": "parameters are"}
        for strategy, plan in STRATEGIES.items():
            is_enough = plan.zero_stage >= STRATEGIES[config.strategy].zero_stage and kind in plan.offloadable
            # At stage 3, the torch engine offloads everything or nothing.
            if is_enough and not (config.engine == "torch" and kind == "optimizer" and plan.releases_weights):
                cost = f"{whats[kind]} kept in CPU memory, about 30 % slower"
                yield Rung({"strategy": strategy, "offload": kind}, cost)


_LADDER: tuple[Callable[[TrainConfig, int, bool], Iterator[Rung]], ...] = (
    lambda config, *_: _halve(config, FEWEST_IMAGES),
    *(_recompute, _shard, _offload),
    lambda config, *_: _halve(config, 2 if config.mixup or config.cutmix else 1),  # images of a micro-batch are mixed
)
