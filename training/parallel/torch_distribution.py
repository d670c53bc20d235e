"""Where PyTorch keeps the parameters, and what moves them: `DistributedDataParallel` and FSDP2 (`fully_shard`).

The first keeps the whole training state on every rank. FSDP2 (Zhao et al. 2023, https://arxiv.org/abs/2304.11277)
shards every parameter by rows, and gathers the weights of one repeated block of the network at a time: at stage 3 they
are released after the block's forward, at stage 2 after its backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from training.parallel.activation_checkpointing import repeated_blocks
from training.parallel.collectives import copy_from_main, gather_rows
from training.parallel.compilation import compile_network
from training.parallel.engine import EngineSetup
from training.parallel.precision import under_autocast
from training.recipe.optimizer import updates_matrices


class Distribution(Protocol):
    """Where the parameters are, and what moves their values and gradients between the ranks.

    Attributes:
        copies: of the gradient of each parameter among those that the ranks' optimizers have.
    """

    copies: int

    def forward(self, images: torch.Tensor, *, is_last_micro_step: bool) -> torch.Tensor:
        """Run the network; gradients are exchanged by backward in the last micro-step of an update; a collective."""

    def settle(self) -> None:
        """Leave the module with the parameters that the optimizer updates; no collective."""

    def first_row(self, parameter: nn.Parameter) -> int:
        """Return the first index of this rank's part in the parameter's first dimension."""

    def owns(self, name: str) -> bool:
        """Return whether this rank is the one of those with the same part of a parameter that reports it."""

    def updates(self, name: str) -> bool:
        """Return whether this rank's optimizer updates its part of a parameter."""

    def share_weights(self) -> None:
        """Copy what one rank has updated for all to the others; a collective."""


class Replicated(Distribution):
    """The whole model on every rank, and gradients that are averaged while backward still runs.

    Every rank updates all weights, or if that takes long (Muon's matrices), each of them is updated by one rank, which
    alone has its optimizer state.
    """

    def __init__(self, setup: EngineSetup) -> None:
        """Wrap the model; a collective."""
        module, world = setup.module, setup.world
        self._module, self._world = module, world
        self._deals_updates = world.size > 1 and updates_matrices(setup.optimizer)
        self.copies = 1 if self._deals_updates else world.size
        # Images are channels_last: kernels would convert the weights in every step, and their gradients afterwards.
        module.to(memory_format=torch.channels_last)
        self._network = under_autocast(module, setup.precision, world.device)
        if setup.compiles:
            compile_network(self._network, setup, keeps_gradients=setup.accumulation_steps > 1)
        self._parallel = self._exchanging() if world.size > 1 else None
        cost = _products if self._deals_updates else torch.Tensor.numel
        self._owners = _deal({name: cost(parameter) for name, parameter in module.named_parameters()}, world.size)

    def _exchanging(self) -> DistributedDataParallel:
        """Wrap the network, and let a backward of zeros pass, after which the buckets stay as they are.

        The first backward decides by its order which parameters share a bucket, and with it the order of sums over
        three ranks or more: a resumed run would otherwise take its first step with other bits.
        """
        # The strides of pointwise and depthwise weights are ambiguous, so DDP warns without a reason.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        # Not a static graph: what it saves, the search for unused parameters, is not done here either.
        parallel = DistributedDataParallel(_AllUsed(self._network, trained), gradient_as_bucket_view=True)
        parallel.broadcast_buffers = False  # the argument has another name from torch 2.15 on
        with torch.enable_grad():
            parallel(None).backward()
        for parameter in trained:
            parameter.grad = None
        return parallel

    def forward(self, images: torch.Tensor, *, is_last_micro_step: bool) -> torch.Tensor:
        if self._parallel is None or not torch.is_grad_enabled():
            return self._network(images)
        if is_last_micro_step:
            return self._parallel(images)
        with self._parallel.no_sync():
            return self._parallel(images)

    def settle(self) -> None: ...

    def first_row(self, parameter: nn.Parameter) -> int:
        return 0

    def owns(self, name: str) -> bool:
        return self._owners[name] == self._world.rank

    def updates(self, name: str) -> bool:
        return self.owns(name) or not self._deals_updates

    @torch.no_grad()
    def share_weights(self) -> None:
        if not self._deals_updates:
            return
        dealt: list[list[torch.Tensor]] = [[] for _ in range(self._world.size)]
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:  # dense, in whatever order of dimensions: as a vector in the order of memory
                dealt[self._owners[name]].append(parameter.as_strided((parameter.numel(),), (1,)))
        sizes = [sum(map(len, weights)) for weights in dealt]
        own = torch.zeros(max(sizes), device=self._world.device)
        torch.cat(dealt[self._world.rank] or [own[:0]], out=own[: sizes[self._world.rank]])
        for weights, size, row in zip(dealt, sizes, gather_rows(own, self._world), strict=True):
            for weight, values in zip(weights, row[:size].split([*map(len, weights)]), strict=True):
                weight.copy_(values)


class Sharded(Distribution):
    """Rows of every parameter on each rank of a replica."""

    def __init__(self, setup: EngineSetup) -> None:
        """Shard the model; a collective."""
        self._module, world, plan = setup.module, setup.world, setup.plan
        self.copies, self._releases = plan.replicas, plan.releases_weights
        self._accumulates = setup.accumulation_steps > 1
        copy_from_main([*self._module.parameters()], world)
        if plan.replicas > 1:
            mesh = init_device_mesh(
                world.device.type, (plan.replicas, plan.shards), mesh_dim_names=("replicas", "shards")
            )
        else:
            mesh = init_device_mesh(world.device.type, (plan.shards,), mesh_dim_names=("shards",))
        self._row, self._shards = mesh.get_local_rank("shards"), plan.shards
        self._is_first_replica = world.rank < plan.shards
        policy = OffloadPolicy()
        if plan.offload != "none":
            policy = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
        options: dict[str, Any] = {"mesh": mesh, "offload_policy": policy, "reshard_after_forward": self._releases}
        units = repeated_blocks(self._module)
        for unit in units:
            if setup.compiles:
                unit.forward = torch.compile(unit.forward)
            fully_shard(unit, **options)
        if setup.compiles and not units:
            self._module.forward = torch.compile(self._module.forward)
        # Backward begins where forward ends: the root's own weights would be gathered again at once.
        fully_shard(self._module, **options | {"reshard_after_forward": False})
        self._network = under_autocast(self._module, setup.precision, world.device)

    def forward(self, images: torch.Tensor, *, is_last_micro_step: bool) -> torch.Tensor:
        if self._accumulates and torch.is_grad_enabled():
            root = cast(FSDPModule, self._module)
            root.set_requires_gradient_sync(is_last_micro_step)
            root.set_reshard_after_backward(is_last_micro_step or self._releases)
        return self._network(images)

    def settle(self) -> None:
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def first_row(self, parameter: nn.Parameter) -> int:
        rows = len(parameter)
        return min(self._row * -(-rows // self._shards), rows)  # as torch.chunk

    def owns(self, name: str) -> bool:
        return self._is_first_replica

    def updates(self, name: str) -> bool:
        return True

    def share_weights(self) -> None: ...


class _AllUsed(nn.Module):
    """A network whose every backward reaches every parameter, with no gradient where there is none.

    `DistributedDataParallel` waits for each of them, and searching the graph for those that a loss does not depend on
    (`find_unused_parameters`) takes time in every step. Without images: zero, by a graph that reaches the parameters
    one after another, the last one first.
    """

    def __init__(self, network: nn.Module, trained: list[nn.Parameter]) -> None:
        super().__init__()
        self._network, self._trained = network, trained

    def forward(self, images: torch.Tensor | None) -> torch.Tensor:
        if images is None:
            zeros = [parameter.flatten()[:1].sum() * 0 for parameter in self._trained]
            total = zeros[0]
            for zero in zeros[1:]:
                total = total + zero
            return total
        return _Reach.apply(self._network(images), *self._trained)


class _Reach(torch.autograd.Function):
    """Identity on logits whose backward also visits parameters, without a gradient for them."""

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        context.parameters = len(parameters)
        return logits.view_as(logits)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, *[None] * context.parameters


def _products(parameter: torch.Tensor) -> int:
    """Return the multiplications of a matrix [n, m] by its transpose; of anything else, the number of elements."""
    rows = len(parameter) if parameter.ndim > 1 else 1
    return parameter.numel() * min(rows, parameter.numel() // rows)


def _deal(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Deal parameters out to ranks, the largest first, each to the rank that has least."""
    loads, owners = [0] * ranks, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = min(range(ranks), key=loads.__getitem__)
        loads[owners[name]] += sizes[name]
    return owners
