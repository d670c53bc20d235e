"""Tensor parallelism: ranks compute every layer together, each with a part of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from zerovision.training.base.errors import UserError
from zerovision.training.base.settings import Values, option
from zerovision.training.base.units import plural
from zerovision.training.engines.ways import NOT_COMPILED, OUR_ENGINE, Way
from zerovision.training.recipe.rules import ELEMENT_WISE

if TYPE_CHECKING:
    from torch import nn

    from zerovision.training.engines.parameter_shards import ModelPart
    from zerovision.training.world.world import World


@dataclass(frozen=True)
class TensorSettings:
    """The settings for tensor parallelism."""

    tensor_parallel: int = option(
        1,
        "Number of ranks on one machine that compute every layer together, each with a part of the layer's "
        "weights (--engine torch; vision transformers, ConvNeXt, MLP-Mixer and VGG).",
        low=1,
        high=1024,
    )


class Tensor(Way):
    """Layers that several ranks compute together."""

    flag = "tensor_parallel"
    division = "ranks compute every layer together, each with a part of its weights"
    divides_layers = True
    goes_with: ClassVar[Values] = {
        **{"engine": OUR_ENGINE, "compile": NOT_COMPILED, "offload": ("none",), "tune": ("full",)},
        **{"replicate_across": ("none",), "optimizer": ELEMENT_WISE},
    }
    resumable = ("tensor_parallel",)

    def check_machine(self, ranks: int) -> None:
        size = self.config.tensor_parallel
        if ranks % size:
            raise UserError(
                f"--tensor-parallel {size}: its ranks exchange activations in every layer and must be on one machine, "
                f"but each machine has {plural(ranks, 'rank')}: start a multiple of {size} on each."
            )

    def prepare(self, module: nn.Module, world: World) -> ModelPart:
        from zerovision.models.tensor_plan import tensor_plan
        from zerovision.training.engines.tensor.layers import split_model
        from zerovision.training.world.collectives import agreed, copy_from_main

        group = world.dimension(self.flag)
        plan = agreed(lambda: tensor_plan(module, self.config.model_type, group.size), world)
        copy_from_main([*module.parameters()], world)
        return split_model(module, plan, group)

    def take_largest_part(self, module: nn.Module) -> None:
        from zerovision.models.tensor_plan import tensor_plan
        from zerovision.training.engines.tensor.layers import split_model
        from zerovision.training.world.world import World

        ranks = self.config.tensor_parallel  # if parts differ, the last rank has the largest
        last = World(ranks - 1, ranks - 1, ranks, ranks, next(module.parameters()).device)
        split_model(module, tensor_plan(module, self.config.model_type, ranks), last)
