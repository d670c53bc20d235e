"""The table of strategies, and the pure function from a strategy's JSON file to DeepSpeed's configuration.

One number has one owner: the JSON file holds sharding and communication, the command line holds the rest
(batch, accumulation, clipping, precision, offload). A key that the command line owns is refused in the file.
This module imports neither torch nor deepspeed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.data.small_files import read_small_text
from training.errors import UserError
from training.parallel.deepspeed_schema import check_deepspeed_json

CONFIG_FOLDER = Path(__file__).resolve().parents[2] / "deepspeed_configs"


@dataclass(frozen=True)
class StrategySpec:
    """One strategy: its JSON file, the ZeRO stage the file must name, and what may be offloaded to CPU memory."""

    config_file: str
    zero_stage: int
    offloadable: tuple[str, ...]
    summary: str


STRATEGIES: dict[str, StrategySpec] = {
    "ddp": StrategySpec("ds_config_ddp.json", 1, ("none",), "ZeRO 1: optimizer state sharded; for models that fit"),
    "fsdp_stage2": StrategySpec(
        "ds_config_fsdp_stage2.json", 2, ("none", "optimizer"), "ZeRO 2: gradients sharded too"
    ),
    "fsdp_stage3": StrategySpec(
        "ds_config_fsdp_stage3.json", 3, ("none", "optimizer", "all"), "ZeRO 3: parameters sharded too"
    ),
}


def read_strategy_json(strategy: str, override: str = "") -> dict[str, Any]:
    """Read and check the DeepSpeed JSON of a strategy.

    Args:
        strategy: a key of `STRATEGIES`.
        override: another file to read in place of the strategy's own; '' reads the strategy's own.

    Raises:
        UserError: naming file and key, if the file is missing or malformed, or has a key that is unknown, of the wrong
            type, `auto` or owned by the command line, or another ZeRO stage than the strategy's.
    """
    spec = STRATEGIES[strategy]
    path = Path(override) if override else CONFIG_FOLDER / spec.config_file
    try:
        content = json.loads(read_small_text(path), object_pairs_hook=_no_doubles)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}).") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    check_deepspeed_json(content, path)
    stage = content.get("zero_optimization", {}).get("stage")
    if stage != spec.zero_stage:
        raise UserError(
            f"{path}: zero_optimization.stage is {stage}; strategy {strategy} is stage {spec.zero_stage}. "
            "Choose another --strategy to change the stage."
        )
    return content


def engine_config(
    strategy_json: Mapping[str, Any],
    *,
    batch_size_per_rank: int,
    accumulation_steps: int,
    gradient_clipping: float,
    offload: str,
) -> dict[str, Any]:
    """Merge a checked strategy JSON with the values that the command line owns.

    Precision does not appear: the model itself runs under autocast (see `training.parallel.precision`), so
    DeepSpeed keeps weights, gradients and optimizer state in fp32 under every strategy.

    Args:
        strategy_json: what `read_strategy_json` returned.
        batch_size_per_rank: images per rank and micro-step.
        accumulation_steps: micro-steps per optimizer step.
        gradient_clipping: largest global L2 norm of the gradient; 0 for none.
        offload: 'none', 'optimizer' or 'all'.

    Returns:
        A new dictionary for `deepspeed.initialize(config=...)`.
    """
    config = json.loads(json.dumps(strategy_json))
    zero = config["zero_optimization"]
    for key, choices in (("offload_optimizer", ("optimizer", "all")), ("offload_param", ("all",))):
        section = zero.pop(key, {})
        if offload in choices:
            zero[key] = {"device": "cpu", "pin_memory": True} | section
    return config | {
        "train_micro_batch_size_per_gpu": batch_size_per_rank,
        "gradient_accumulation_steps": accumulation_steps,
        # Always given: DeepSpeed's own default is 1.0.
        "gradient_clipping": gradient_clipping,
        # Our optimizers come from timm; DeepSpeed knows only a few by name.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise UserError(f"key '{next(key for key in keys if keys.count(key) > 1)}' is given twice.")
    return result
