"""FSDP2 (`fully_shard`), with gradients added in a fixed order; each rank has rows of every parameter.

FSDP2 (Zhao et al. 2023, https://arxiv.org/abs/2304.11277) gathers the weights of one repeated block of the network at a
time. At stage 3, they are released after the block's forward; at stage 2, after its backward. FSDP2's reduce-scatter,
whose sums depend on the number of ranks, is replaced by one that adds gradients along the step's tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from zerovision.models.timm_models import PLAIN_CONVOLUTIONS
from zerovision.training.engines.activation_checkpointing import repeated_blocks
from zerovision.training.engines.compilation import compile_network
from zerovision.training.engines.engine import EngineSetup
from zerovision.training.engines.parameter_shards import WEIGHTS, ParameterShard
from zerovision.training.engines.precision import DTYPES, under_autocast
from zerovision.training.engines.summation_tree import LeafSums, SumOfSquares, pieces_per_row, plan_segment
from zerovision.training.engines.tree_reduce_scatter import TreeReduceScatter, machine_levels
from zerovision.training.recipe.optimizer import moments_of
from zerovision.training.world.collectives import copy_from_main

# On a CPU, fused optimizer rules, and powers (as in MADGRAD), round the last elements of a tensor differently from the
# other elements, unless they fill the unit that a kernel processes: two AVX-512 vectors.
VECTOR_ELEMENTS = 32
# Layers that use their parameters only in a product. Subclasses are excluded: some standardize their weights in fp32.
CAST_LAYERS = (nn.Linear, *PLAIN_CONVOLUTIONS)
MULTIPLIER, MODULUS = 31, 2**31 - 1  # of a polynomial hash of the indices of the blocks that ran


class Fsdp2:
    """A model with rows of every parameter on each rank of a replica, or whole parameters on a single rank.

    Between steps, a rank has only its rows of the weights, at stage 2 as at stage 3. The optimizer receives plain
    vectors, because dispatching an operation on a DTensor is many times slower.
    """

    def __init__(self, setup: EngineSetup) -> None:
        """Shard the model; a collective."""
        self._module, self._optimizer, world, plan = setup.module, setup.optimizer, setup.data, setup.plan
        self._accumulation_steps, self._releases = setup.accumulation_steps, plan.releases_weights
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        grouped = [[names[id(one)] for one in group.pop("params")] for group in self._optimizer.param_groups]
        # FSDP2 accepts no other layout. It also moves the weights to a GPU itself, where only one block at a time is
        # gathered.
        self._module.to(memory_format=torch.contiguous_format)
        copy_from_main([*self._module.parameters()], world)
        self._shards = plan.gradient_shards
        self._reduce: list[TreeReduceScatter] = []
        self._blocks_run = 0  # hash of the blocks that ran in this step
        self._row = world.rank % self._shards
        self.reports = world.rank < self._shards
        if world.size > 1:
            self._shard(setup)
        self._network = under_autocast(self._module, setup.precision, world.device)
        if world.size == 1 and setup.compiles:
            compile_network(self._network, setup)
        self._parameters = dict(self._module.named_parameters())
        trained = {name for group in grouped for name in group}
        self._parts = {
            name: _Part(parameter)
            for name, parameter in self._parameters.items()
            if name in trained and _local(parameter).numel()
        }
        for group, members in zip(self._optimizer.param_groups, grouped, strict=True):
            group["params"] = [self._parts[name].trained for name in members if name in self._parts]
        self._part = setup.part
        adds_leaves = world.size == 1 and setup.accumulation_steps > 1
        self._own_sums = _OwnSums(self._parts, setup.accumulation_steps) if adds_leaves else None
        self._is_last_leaf = True
        self._sum_of_squares = SumOfSquares(self._own_pieces(trained), world)

    def _shard(self, setup: EngineSetup) -> None:
        """Shard the modules; a collective."""
        world, plan = setup.data, setup.plan
        replicas = world.size // self._shards
        names = ("replicas", "shards") if replicas > 1 else ("shards",)
        sizes = (replicas, self._shards, dist.get_world_size() // world.size)  # last: ranks with other layers or slices
        mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=("replicas", "shards", "parts"))[names]
        policy = OffloadPolicy()
        if plan.offload != "none":
            policy = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
        options: dict[str, Any] = {"mesh": mesh["shards"], "offload_policy": policy}
        levels = machine_levels(world, setup.leaves, setup.notes) if replicas == 1 else None
        if setup.precision != "fp32":
            options["mp_policy"] = _gather_as_computed(self._module, DTYPES[setup.precision])
        units = repeated_blocks(self._module)
        for number, unit in enumerate(units, 1):
            unit.register_forward_pre_hook(partial(self._note_block, number))
            if setup.compiles:
                unit.forward = torch.compile(unit.forward)
            fully_shard(unit, reshard_after_forward=self._releases, **options)
        if setup.compiles and not units:
            self._module.forward = torch.compile(self._module.forward)
        # Backward begins where forward ends, so the root's own weights would immediately be gathered again.
        fully_shard(self._module, reshard_after_forward=False, **options)
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                self._reduce.append(TreeReduceScatter(setup.leaves, mesh, world, levels))
                module.set_custom_reduce_scatter(self._reduce[-1])
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                # Otherwise, only this rank would leave a parameter without a gradient, or a block that no forward has
                # gathered yet, out of a micro-batch's sums.
                module.set_reduce_scatter_unused_params(True, recurse=False)
                module.unshard()
                module.reshard()

    def _note_block(self, number: int, block: nn.Module, _: Any) -> None:
        if block.training:
            self._blocks_run = (self._blocks_run * MULTIPLIER + number) % MODULUS

    def _own_pieces(self, trained: set[str]) -> torch.Tensor:
        """Return each counted piece's index among this rank's pieces, int64 [pieces]; -1 for other ranks' pieces."""
        places, own = [torch.arange(0)], 0
        for name, parameter in self._parameters.items():
            if name not in trained:
                continue
            rows = len(parameter)
            pieces = pieces_per_row(parameter.numel() // rows) if parameter.ndim > 1 else 1
            low, high = (pieces * _first_row(rows, self._row + more, self._shards) for more in (0, 1))
            if self._part.counts(name):
                places.append(torch.full((rows * pieces,), -1))
                if self.reports:  # only one replica reports
                    places[-1][low:high] = torch.arange(own, own + high - low)
            own += high - low
        return torch.cat(places)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Run the network on images [B, C, H, W]; a collective, which gathers weights."""
        return self._network(images)

    def begin_backward(self, leaf: int, _stage: int = 0) -> None:
        """Prepare for the backward pass of one of this rank's leaves, which are numbered from 0 in each step."""
        self._is_last_leaf = leaf == self._accumulation_steps - 1
        if isinstance(self._module, FSDPModule):
            self._module.set_reshard_after_backward(self._is_last_leaf or self._releases)
        for reduce in self._reduce:
            reduce.leaf = leaf

    def end_backward(self, _stage: int = 0) -> None:
        """Drop the gradients that a backward leaves behind; until the last leaf, `TreeReduceScatter` has the sums."""
        if self._own_sums is not None:
            self._own_sums.add_leaf(is_last=self._is_last_leaf)
        elif not self._is_last_leaf:  # the last leaf yields the sum
            for part in self._parts.values():
                part.parameter.grad = None

    def sum_gradients(self) -> torch.Tensor:
        """Sum the optimizer's gradients over all leaves, and return their sum of squares, float64 []; a collective."""
        for part in self._parts.values():
            part.take_weights()
        norms = [part.take_gradient() for part in self._parts.values()]
        whole = (part.trained for name, part in self._parts.items() if not self._part.is_divided(name))
        self._part.share_gradients(whole)
        # With more ranks than rows, some ranks have no rows.
        squares, blocks_run = torch.cat(norms).double().square() if norms else torch.zeros(0).double(), self._blocks_run
        self._blocks_run = 0
        # The result is NaN if ranks ran different blocks: they have combined tensors that do not belong together.
        return self._sum_of_squares(squares, mark=blocks_run)

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply the optimizer's gradients by a scalar tensor [] on this rank's device."""
        gradients = [part.trained.grad for part in self._parts.values() if part.trained.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].device, torch.float32))

    def share_weights(self) -> None:
        """Copy the updated rows into the module, whose next forward gathers them; not a collective."""
        for part in self._parts.values():
            part.give_weights()

    def settle(self) -> None:
        """Shard all weights again, and set the optimizer's parameters to this rank's rows; not a collective."""
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for part in self._parts.values():
            part.take_weights()

    def shards(self) -> list[ParameterShard]:
        """Return this rank's rows of all parameters, with their optimizer state; not a collective."""
        self.settle()
        shards = []
        for name, parameter in self._parameters.items():
            local = _local(parameter).detach()
            if local.numel():
                tensors = {WEIGHTS: local}
                if name in self._parts:
                    moments = moments_of(self._optimizer, self._parts[name].trained)
                    tensors |= {kind: moment[: local.numel()].view(local.shape) for kind, moment in moments.items()}
                offsets = (_first_row(len(parameter), self._row, self._shards), *[0] * (parameter.ndim - 1))
                shards.append(ParameterShard(name, offsets, tensors))
        return shards


class _Part:
    """This rank's rows of a parameter, and the vector of these rows that the optimizer updates."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        local = _local(parameter).detach()
        self._elements = local.numel()
        padding = -self._elements % VECTOR_ELEMENTS if local.device.type == "cpu" else 0
        flat = nn.functional.pad(local.view(-1), (0, padding)) if padding else local.view(-1)
        self.trained = nn.Parameter(flat)  # [n], padded on a CPU to a whole number of SIMD vectors
        self._gradient = torch.zeros_like(flat) if padding else None
        row = local[0].numel()
        self._piece = row // pieces_per_row(row)  # number of elements

    def take_weights(self) -> None:
        """Copy the module's parameter, which FSDP2 may have moved, into the vector."""
        flat = _local(self.parameter).detach().view(-1)
        if self._gradient is None:
            self.trained.data = flat
        else:
            self.trained.data[: self._elements].copy_(flat)

    def give_weights(self) -> None:
        """Copy the vector into the module's parameter."""
        if self._gradient is not None:
            _local(self.parameter).detach().view(-1).copy_(self.trained.data[: self._elements])

    def take_gradient(self) -> torch.Tensor:
        """Move the gradient from the module's parameter to the vector; return the norms of its rows' pieces."""
        gradient, self.parameter.grad = self.parameter.grad, None
        values = torch.zeros_like(_local(self.parameter)) if gradient is None else _local(gradient)
        if self._gradient is None:
            self.trained.grad = values.reshape(-1)
        else:
            self._gradient[: self._elements].copy_(values.reshape(-1))
            self.trained.grad = self._gradient
        if values.ndim == 1:
            return values
        return torch.linalg.vector_norm(values.reshape(-1, self._piece), dim=1)


class _OwnSums:
    """Sums over two or more leaves of a step on a single rank, whose parameters are plain tensors."""

    def __init__(self, parts: Mapping[str, _Part], leaves: int) -> None:
        self._parameters = [part.parameter for part in parts.values()]
        sizes = [parameter.numel() for parameter in self._parameters]
        sums = 1 + plan_segment(0, leaves, leaves).most_parked
        rows = [torch.zeros(sum(sizes), device=self._parameters[0].device) for _ in range(sums)]
        self._sums = LeafSums(rows, 0, leaves)
        flats = zip(rows[0].split(sizes), self._parameters, strict=True)
        self._places = [flat.view_as(parameter) for flat, parameter in flats]

    def add_leaf(self, *, is_last: bool) -> None:
        """Add the parameters' gradients to the sums; after the step's last leaf, the gradients become the sums."""
        self._sums.add(self._places, [parameter.grad for parameter in self._parameters])
        for parameter, place in zip(self._parameters, self._places, strict=True):
            parameter.grad = place if is_last else None
        if is_last:
            self._sums.clear()


def _gather_as_computed(module: nn.Module, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Return a policy that gathers weights in `dtype` if autocast would cast them, and otherwise in fp32.

    The results are bit-identical to autocast's, with half the bytes sent and no whole copies kept until backward.
    """
    layers = (layer for layer in module.modules() if type(layer) in CAST_LAYERS)
    cast = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    return MixedPrecisionPolicy(
        dtype,
        cast_forward_inputs=False,
        param_dtype_override_fn=lambda parameter: dtype if id(parameter) in cast else parameter.dtype,
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _first_row(rows: int, shard: int, shards: int) -> int:
    """Return the first row of a shard, divided as in `torch.chunk`."""
    return min(shard * -(-rows // shards), rows)
