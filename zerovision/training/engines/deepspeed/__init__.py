"""DeepSpeed's ZeRO, which replaces PyTorch's engine and is configured by JSON files.

Each value is set in one place: the JSON file configures DeepSpeed's sharding and communication, and the command line
sets everything else (batch size, accumulation, clipping, precision, offload). The file must not contain a key that a
flag sets. This module imports neither torch nor DeepSpeed.

DeepSpeed ignores misspelled top-level keys (`zero_optimisation` silently trains at stage 0) and treats some `auto`
values as false; this module reports each mistake with the file and the key. Key names and types follow DeepSpeed's
configuration reference (https://www.deepspeed.ai/docs/config-json/).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerovision.training.base.errors import UserError, check_installed, nearest
from zerovision.training.base.files import read_small_text
from zerovision.training.base.run_folder import REPO_ROOT
from zerovision.training.base.settings import path_option
from zerovision.training.engines.ways import STRATEGIES, Way

if TYPE_CHECKING:
    from torch import nn

    from zerovision.training.engines.engine import Engine, EngineSetup
    from zerovision.training.engines.ways import ParallelPlan

BOOL, TEXT, LIST = "true or false", "text", "a list"
COUNT, NUMBER, WHOLE = "a whole number, 0 or more", "a number, 0 or more", "a whole number"
KINDS = {"flag": BOOL, "text": TEXT, "list": LIST, "count": COUNT, "number": NUMBER, "whole": WHOLE}


def _keys(words: str) -> dict[str, Any]:
    """Return the expected kind of value for each key, given words of the form `key:kind`."""
    return {key: KINDS[kind] for key, kind in (word.split(":") for word in words.split())}


_OFFLOAD = _keys("pin_memory:flag buffer_count:count buffer_size:count nvme_path:text")
# A dictionary is a nested section.
SCHEMA: dict[str, Any] = {
    "zero_optimization": {
        **_keys(
            "stage:count contiguous_gradients:flag reduce_scatter:flag reduce_bucket_size:count "
            "use_multi_rank_bucket_allreduce:flag allgather_partitions:flag allgather_bucket_size:count "
            "overlap_comm:flag compute_grad_norm:flag round_robin_gradients:flag ignore_unused_parameters:flag "
            "sub_group_size:count stage3_prefetch_bucket_size:count stage3_param_persistence_threshold:count "
            "stage3_model_persistence_threshold:count stage3_max_live_parameters:count stage3_max_reuse_distance:count "
            "stage3_module_granularity_threshold:count stage3_use_all_reduce_for_fetch_params:flag "
            "stage3_allgather_sequential:flag memory_efficient_linear:flag zero_hpz_partition_size:count "
            "zero_quantized_weights:flag zero_quantized_gradients:flag log_trace_cache_warnings:flag"
        ),
        "leaf_module": _keys("classes:list names:list name_suffixes:list"),
        "offload_optimizer": _OFFLOAD | _keys("pipeline_read:flag pipeline_write:flag ratio:number"),
        "offload_param": _OFFLOAD | _keys("max_in_cpu:count"),
    },
    **_keys(
        "communication_data_type:text prescale_gradients:flag gradient_predivide_factor:number "
        "wall_clock_breakdown:flag memory_breakdown:flag dump_state:flag"
    ),
    "flops_profiler": _keys(
        "enabled:flag profile_step:count module_depth:whole top_modules:count detailed:flag "
        "recompute_fwd_factor:number output_file:text"
    ),
    "comms_logger": _keys("enabled:flag verbose:flag prof_all:flag debug:flag prof_ops:list"),
}
# DeepSpeed keys that only the command line may set, with the flags to use instead.
OWNED_BY_COMMAND_LINE = {
    "train_batch_size": "--batch-size, --gradient-accumulation-steps and the number of GPUs",
    "train_micro_batch_size_per_gpu": "--batch-size",
    "gradient_accumulation_steps": "--gradient-accumulation-steps",
    "gradient_clipping": "--gradient-clipping",
    "optimizer": "--optimizer, --learning-rate and --weight-decay",
    "scheduler": "--schedule, --warmup-epochs and --final-learning-rate-scale",
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "amp", "torch_autocast", "data_types"), "--precision"),
    "steps_per_print": "--log-every-steps",
    "tensorboard": "--tensorboard",
    "activation_checkpointing": "--activation-checkpointing",
    "compile": "--compile",
    "checkpoint": "--resume, --save-every-steps, --save-every-minutes and --keep-last",
    "elasticity": "--min-nodes of scripts/launch_multi_node.sh",
    "zero_optimization.offload_optimizer.device": "--offload",
    "zero_optimization.offload_param.device": "--offload",
    "zero_optimization.cpu_offload": "--offload optimizer",
    "zero_optimization.cpu_offload_param": "--offload all",
}


def check_deepspeed_json(content: Any, path: Path) -> None:
    """Raise a UserError that lists every key of a parsed file that is unknown, not allowed, or has a wrong value."""
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: expected a JSON object, as in deepspeed_configs/.")
    if mistakes := list(_mistakes(content, SCHEMA, prefix="")):
        first, *others = mistakes
        raise UserError(f"{path}: {' '.join([first, *(other[0].upper() + other[1:] for other in others)])}")


def _mistakes(section: Mapping[str, Any], schema: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield a sentence for each key that is not allowed or has a wrong value."""
    for key, value in section.items():
        name = prefix + key
        expected = schema.get(key)
        if name in OWNED_BY_COMMAND_LINE:
            yield f"key '{name}' is not allowed here: use {OWNED_BY_COMMAND_LINE[name]}."
        elif expected is None:
            yield f"key '{name}' is unknown, or has no effect here.{nearest(key, schema)}"
        elif value == "auto":
            yield f"key '{name}' is 'auto', which is not supported here: set a value."
        elif isinstance(expected, Mapping):
            if isinstance(value, Mapping):
                yield from _mistakes(value, expected, prefix=name + ".")
            else:
                yield f"key '{name}': expected an object with {', '.join(expected)}."
        elif not _fits(value, expected):
            yield f"key '{name}' is {value!r}: expected {expected}."


def _fits(value: Any, expected: str) -> bool:
    if isinstance(value, bool):
        return expected == BOOL
    if isinstance(value, (int, float)):
        # DeepSpeed reads 5e8 as a whole number, and its documentation writes bucket sizes that way.
        whole = float(value).is_integer()
        if expected == COUNT:
            return whole and value >= 0
        return (expected == NUMBER and value >= 0) or (expected == WHOLE and whole)
    return (isinstance(value, str) and expected == TEXT) or (isinstance(value, list) and expected == LIST)


# The keys of zero_optimization that do more than tune performance: they change what is stored or sent.
_MORE_THAN_ADVICE = {"zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"}


def read_strategy_json(strategy: str, override: str = "") -> dict[str, Any]:
    """Read and check a strategy's JSON file, or the file `override`; a UserError names the file and the key."""
    path = Path(override) if override else REPO_ROOT / f"deepspeed_configs/ds_config_{strategy}.json"
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
            f"{path}: zero_optimization.stage is {stage}, but strategy {strategy} is stage {expected}. "
            "Choose another --strategy to change the stage."
        )
    return content


def deepspeed_config(strategy_json: Mapping[str, Any], setup: EngineSetup) -> dict[str, Any]:
    """Return DeepSpeed's config: a strategy's checked JSON, merged with the values that the command line sets.

    It sets no precision: the model itself runs under autocast (see `zerovision.training.engines.precision`), so
    DeepSpeed keeps weights, gradients and optimizer state in fp32 under every strategy.
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
        # Always set, because DeepSpeed's default is 1.0.
        "gradient_clipping": setup.gradient_clipping,
        # Our optimizers come from timm, and DeepSpeed recognizes only a few of them by name.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise UserError(f"key '{next(key for key in keys if keys.count(key) > 1)}' occurs more than once.")
    return result


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
        content = read_strategy_json(self.config.strategy, self.config.deepspeed_config)
        return sorted({*content} - {"zero_optimization"} | _MORE_THAN_ADVICE & {*content["zero_optimization"]})

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
