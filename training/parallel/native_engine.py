"""ZeRO over flat buffers, in plain PyTorch: what DeepSpeed does, without its Python per parameter.

Parameters are views of a few flat fp32 buffers, a bucket each (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054). Every rank owns an equal part of a bucket: it receives the sum of that part's
gradients, while backward still computes those of other buckets, keeps the optimizer's state of it and updates it; then
the parts are gathered again.

The same weights come out on any number of ranks, to the bit: gradients are added along one tree over the leaves of a
step, whoever computes them (`training.parallel.summation_tree`), every leaf has its own BatchNorm statistics, and norms
are sums over blocks whose boundaries do not depend on the ranks.

Images are channels_last, and so are the weights of convolutions, their gradients and moments in the flat buffers:
kernels would otherwise convert them in every step. Everything else sees the usual order of dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from training.parallel.block_norms import BlockSum
from training.parallel.buckets import BackwardOrder, make_buckets
from training.parallel.collectives import barrier
from training.parallel.compilation import compile_network
from training.parallel.engine import Engine, EngineSetup, StepResult, Updates
from training.parallel.model_buffers import ModelBuffers
from training.parallel.parameter_shards import (
    CONVOLUTION_DIMENSIONS,
    WEIGHTS,
    EngineState,
    fill_shards,
    frozen_parameters,
    frozen_shards,
    parameter_shapes,
)
from training.parallel.precision import under_autocast
from training.parallel.summation_tree import StepTree
from training.recipe.lamb import bind_lamb
from training.recipe.optimizer import create_state, moment_kinds, moments_of, restart, set_applied_steps


class NativeEngine(Engine):
    """A model whose training state is sharded over the ranks by flat buffers.

    The optimizer's groups get this rank's flat parts as their parameters.
    """

    def __init__(self, setup: EngineSetup) -> None:
        """Take over the parameters; a collective."""
        self.module, self.optimizer, self._world = setup.module, setup.optimizer, setup.world
        self.updates = Updates(self.optimizer, setup.precision, setup.gradient_clipping, self._world.device)
        self.loss_scale = self.updates.loss_scale
        self._network = under_autocast(setup.module, setup.precision, setup.world.device)
        self._accumulation_steps, self._releases = setup.accumulation_steps, setup.plan.releases_weights
        tree = StepTree(self._world.size, self._accumulation_steps)
        self.buffers = ModelBuffers(self.module, versions=self._accumulation_steps)
        for parameter in frozen_parameters(self.module).values():
            if parameter.ndim == CONVOLUTION_DIMENSIONS:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        self._micro_steps = 0
        self._buckets, self._gradients = make_buckets(
            self.module, self.optimizer, self._world, tree, releasable=self._releases
        )
        self._order = BackwardOrder(self.module, self._buckets)
        create_state(self.optimizer, (bucket.master for bucket in self._buckets))
        self._block_sum = BlockSum([(bucket.elements, len(bucket.master)) for bucket in self._buckets], self._world)
        self._has_all_weights = True
        bind_lamb(self.optimizer, self.state(), setup.world, by_blocks=True)
        if setup.compiles:
            compile_network(self._network, setup)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self._gather()
        if self.module.training:
            self.buffers.select(self._micro_steps % self._accumulation_steps)
        return self._network(images)

    def backward(self, loss: torch.Tensor) -> None:
        scale = self.updates.scale / (self._world.size * self._accumulation_steps)
        is_last_leaf = (self._micro_steps + 1) % self._accumulation_steps == 0
        self._order.begin(sums_over_ranks=is_last_leaf)
        (loss * scale).backward()
        self._order.end()

    def step(self) -> StepResult | None:
        self._micro_steps += 1
        if self._micro_steps % self._accumulation_steps:
            return None
        norm = self._sum_gradients() / self.updates.scale
        result = self.updates.apply(norm, lambda: self._update(norm))
        for bucket in self._buckets:
            bucket.buffers.sums.clear()
        return result

    def _sum_gradients(self) -> torch.Tensor:
        """Set the buckets' gradients to their sums over the leaves; return the L2 norm, float64 []; a collective."""
        for bucket in self._buckets:
            bucket.master.grad = bucket.buffers.sum_own_part()
        # All ranks have read the gradients when this returns: they may be written again.
        return self._block_sum(self._gradients).sqrt()

    @torch.no_grad()
    def _update(self, norm: torch.Tensor) -> None:
        factor = self.updates.factor(norm)
        if factor is not None:
            self._gradients.mul_(factor)
        self.optimizer.step()
        self._spread_weights()

    def _spread_weights(self) -> None:
        """Let every rank compute with what its own and the other ranks' parts are now; a collective."""
        if self._releases:
            for bucket in self._buckets:
                bucket.buffers.release_weights()
            self._has_all_weights = False
        else:
            self._gather(changed=True)

    def restart_optimizer(self) -> None:
        self.updates.applied = 0
        restart(self.optimizer)

    @torch.no_grad()
    def change_weights(self, change: Callable[[torch.Tensor, dict[str, torch.Tensor]], None]) -> None:
        if any(bucket.buffers.are_shared for bucket in self._buckets):
            barrier(self._world)  # no rank computes any more with weights that all share
        for bucket in self._buckets:
            change(bucket.master, self.optimizer.state[bucket.master])
        self._spread_weights()

    def state(self) -> EngineState:
        kinds, shards = moment_kinds(self.optimizer), frozen_shards(self.module, self._world)
        for bucket in self._buckets:
            shards += bucket.shards(moments_of(self.optimizer, bucket.master))
        return EngineState(
            parameter_shapes(self.module), kinds, shards, self.buffers.by_name(), int(self.updates.applied)
        )

    @torch.no_grad()
    def load_state(
        self,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        buffers: Mapping[str, torch.Tensor],
        applied_steps: int,
    ) -> None:
        self.updates.applied = applied_steps
        set_applied_steps(self.optimizer, applied_steps)
        for name, parameter in frozen_parameters(self.module).items():
            parameter.copy_(tensors[WEIGHTS][name])
        fill_shards(self.state().shards, tensors)
        self.buffers.write(buffers)
        self._gather(changed=True)

    def close(self) -> None: ...

    def _gather(self, *, changed: bool = False) -> None:
        """Gather all weights on this rank; a collective if they were released or have changed."""
        if changed or not self._has_all_weights:
            for bucket in self._buckets:
                bucket.buffers.start_gather()
            for bucket in self._buckets:
                bucket.buffers.finish_gather()
            self._has_all_weights = True
