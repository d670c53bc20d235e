"""DeepSpeed's ZeRO, which replaces PyTorch's engine and is configured by JSON files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerovision.training.base.errors import check_installed
from zerovision.training.base.settings import path_option
from zerovision.training.engines.deepspeed.config import deepspeed_config, keys_of_deepspeed_alone, read_strategy_json
from zerovision.training.engines.ways import Way

if TYPE_CHECKING:
    from torch import nn

    from zerovision.training.engines.engine import Engine, EngineSetup
    from zerovision.training.engines.strategies import ParallelPlan


@dataclass(frozen=True)
class DeepSpeedSettings:
    """The settings that only DeepSpeed supports."""

    deepspeed_config: str = path_option("", "DeepSpeed JSON file to use instead of the strategy's default file.")

    @property
    def has_own_sharding(self) -> bool:
        """Whether the user's own file defines the sharding, so that nothing else may change it."""
        return bool(self.deepspeed_config)


class DeepSpeed(Way):
    """Training state that DeepSpeed shards."""

    flag = "engine"
    engine = "deepspeed"
    resumable = ("deepspeed_config",)

    def is_asked(self) -> bool:
        return self.config.engine == self.engine

    def check_files(self) -> None:
        if self.is_asked():
            check_installed("deepspeed")
        read_strategy_json(self.config.strategy, self.config.deepspeed_config)

    def alone_knows(self) -> list[str]:
        return keys_of_deepspeed_alone(read_strategy_json(self.config.strategy, self.config.deepspeed_config))

    def reasons(self, plan: ParallelPlan, module: nn.Module) -> list[str]:
        numbers = [name for name, one in module.named_parameters() if not one.ndim and plan.zero_stage > 1]
        better = ["--offload"] * (plan.offload != "none")
        return self.alone_knows() + better + [f"how to shard the single number {name}" for name in numbers[:1]]

    def files(self, setup: EngineSetup) -> dict[str, dict[str, Any]]:
        return {"deepspeed_config.json": self._configuration(setup)}

    def build_engine(self, setup: EngineSetup) -> Engine:
        from zerovision.training.engines.deepspeed.engine import DeepSpeedEngine  # takes seconds to import

        if not self.is_asked():
            reasons = ", ".join(self.reasons(setup.plan, setup.module))
            setup.notes.append(f"--engine auto chose deepspeed, the only engine that supports {reasons}")
        return DeepSpeedEngine(setup, self._configuration(setup))

    def _configuration(self, setup: EngineSetup) -> dict[str, Any]:
        return deepspeed_config(read_strategy_json(self.config.strategy, self.config.deepspeed_config), setup)
