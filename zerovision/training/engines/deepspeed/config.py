"""Turns a strategy's JSON file into DeepSpeed's configuration; only DeepSpeed uses these files.

Each number has one owner: the JSON file has DeepSpeed's sharding and communication, the command line the rest (batch,
accumulation, clipping, precision, offload). The file must not contain a key that a flag sets. This module imports
neither torch nor DeepSpeed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerovision.training.base.errors import UserError
from zerovision.training.base.places import REPO_ROOT
from zerovision.training.base.small_files import read_small_text
from zerovision.training.engines.deepspeed.schema import check_deepspeed_json
from zerovision.training.engines.strategies import STRATEGIES

if TYPE_CHECKING:
    from zerovision.training.engines.engine import EngineSetup

CONFIG_FOLDER = REPO_ROOT / "deepspeed_configs"
# The keys of zero_optimization that are more than advice: they change what is stored or sent.
_MORE_THAN_ADVICE = {"zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"}


def strategy_file(strategy: str) -> Path:
    """Return the JSON file of a strategy."""
    return CONFIG_FOLDER / f"ds_config_{strategy}.json"


def read_strategy_json(strategy: str, override: str = "") -> dict[str, Any]:
    """Read and check the DeepSpeed JSON of a strategy.

    Args:
        strategy: a key of `STRATEGIES`.
        override: another file to read instead of the strategy's own, or ''.

    Raises:
        UserError: with file and key, if the file is missing or malformed, has a key that is unknown, has the wrong
            type, is `auto` or is set by a flag, or has another ZeRO stage than the strategy.
    """
    path = Path(override) if override else strategy_file(strategy)
    try:
        content = json.loads(read_small_text(path), object_pairs_hook=_no_doubles)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}).") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    check_deepspeed_json(content, path)
    stage, expected = content.get("zero_optimization", {}).get("stage"), STRATEGIES[strategy].zero_stage
    if stage != expected:
        raise UserError(
            f"{path}: zero_optimization.stage is {stage}; strategy {strategy} is stage {expected}. "
            "Choose another --strategy to change the stage."
        )
    return content


def keys_of_deepspeed_alone(strategy_json: Mapping[str, Any]) -> list[str]:
    """Return the keys of a checked JSON that no other engine supports."""
    zero = strategy_json.get("zero_optimization", {})
    return sorted({*strategy_json} - {"zero_optimization"} | _MORE_THAN_ADVICE & {*zero})


def deepspeed_config(strategy_json: Mapping[str, Any], setup: EngineSetup) -> dict[str, Any]:
    """Merge a checked strategy JSON with the values that the command line owns.

    Precision does not appear: the model itself runs under autocast (see `zerovision.training.engines.precision`), so
    DeepSpeed keeps weights, gradients and optimizer state in fp32 under every strategy.

    Args:
        strategy_json: the result of `read_strategy_json`.
        setup: batch size, accumulation, clipping and offload of the engine.

    Returns:
        A new dictionary for `deepspeed.initialize(config=...)`.
    """
    config = json.loads(json.dumps(strategy_json))
    zero = config["zero_optimization"]
    for key, choices in (("offload_optimizer", ("optimizer", "all")), ("offload_param", ("all",))):
        section = zero.pop(key, {})
        if setup.plan.offload in choices:
            zero[key] = {"device": "cpu", "pin_memory": True} | section
    return config | {
        "train_micro_batch_size_per_gpu": setup.batch_size,
        "gradient_accumulation_steps": setup.accumulation_steps,
        # Always given: DeepSpeed's own default is 1.0.
        "gradient_clipping": setup.gradient_clipping,
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
