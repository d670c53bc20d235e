"""A strict check of a user's DeepSpeed JSON, before DeepSpeed's own lenient one.

DeepSpeed ignores misspelt top-level keys (`zero_optimisation` silently trains at stage 0) and reads some `auto`
values as false; here each gets one line with file and key.
Key names and types follow DeepSpeed's configuration reference (https://www.deepspeed.ai/docs/config-json/).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from training.base.errors import UserError, nearest

BOOL = "true or false"
COUNT = "a whole number, 0 or more"
NUMBER = "a number, 0 or more"
TEXT = "text"
LIST = "a list"

_OFFLOAD = {"pin_memory": BOOL, "buffer_count": COUNT, "buffer_size": COUNT, "nvme_path": TEXT}

# A dictionary stands for a nested section.
SCHEMA: dict[str, Any] = {
    "zero_optimization": {
        "stage": COUNT,
        "contiguous_gradients": BOOL,
        "reduce_scatter": BOOL,
        "reduce_bucket_size": COUNT,
        "use_multi_rank_bucket_allreduce": BOOL,
        "allgather_partitions": BOOL,
        "allgather_bucket_size": COUNT,
        "overlap_comm": BOOL,
        "compute_grad_norm": BOOL,
        "round_robin_gradients": BOOL,
        "ignore_unused_parameters": BOOL,
        "sub_group_size": COUNT,
        "stage3_prefetch_bucket_size": COUNT,
        "stage3_param_persistence_threshold": COUNT,
        "stage3_model_persistence_threshold": COUNT,
        "stage3_max_live_parameters": COUNT,
        "stage3_max_reuse_distance": COUNT,
        "stage3_module_granularity_threshold": COUNT,
        "stage3_use_all_reduce_for_fetch_params": BOOL,
        "stage3_allgather_sequential": BOOL,
        "memory_efficient_linear": BOOL,
        "zero_hpz_partition_size": COUNT,
        "zero_quantized_weights": BOOL,
        "zero_quantized_gradients": BOOL,
        "log_trace_cache_warnings": BOOL,
        "leaf_module": {"classes": LIST, "names": LIST, "name_suffixes": LIST},
        "offload_optimizer": _OFFLOAD | {"pipeline_read": BOOL, "pipeline_write": BOOL, "ratio": NUMBER},
        "offload_param": _OFFLOAD | {"max_in_cpu": COUNT},
    },
    "communication_data_type": TEXT,
    "prescale_gradients": BOOL,
    "gradient_predivide_factor": NUMBER,
    "wall_clock_breakdown": BOOL,
    "memory_breakdown": BOOL,
    "dump_state": BOOL,
    "flops_profiler": {
        "enabled": BOOL,
        "profile_step": COUNT,
        "module_depth": "a whole number",
        "top_modules": COUNT,
        "detailed": BOOL,
        "recompute_fwd_factor": NUMBER,
        "output_file": TEXT,
    },
    "comms_logger": {"enabled": BOOL, "verbose": BOOL, "prof_all": BOOL, "debug": BOOL, "prof_ops": LIST},
}
# Keys of DeepSpeed that the command line owns, with the flag to use instead.
OWNED_BY_COMMAND_LINE = {
    "train_batch_size": "--batch-size, --gradient-accumulation-steps and the number of GPUs",
    "train_micro_batch_size_per_gpu": "--batch-size",
    "gradient_accumulation_steps": "--gradient-accumulation-steps",
    "gradient_clipping": "--gradient-clipping",
    "optimizer": "--optimizer, --learning-rate and --weight-decay",
    "scheduler": "--schedule, --warmup-epochs and --final-learning-rate-scale",
    "bf16": "--precision",
    "bfloat16": "--precision",
    "fp16": "--precision",
    "amp": "--precision",
    "torch_autocast": "--precision",
    "data_types": "--precision",
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
    """Check every key and value of a DeepSpeed JSON that a user may have edited.

    Args:
        content: the parsed file.
        path: the file, for messages.

    Raises:
        UserError: naming every key that is unknown or refused, or whose value is wrong.
    """
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: expected a JSON object, as in deepspeed_configs/.")
    if mistakes := list(_mistakes(content, SCHEMA, prefix="")):
        first, *others = mistakes
        raise UserError(f"{path}: {' '.join([first, *(other[0].upper() + other[1:] for other in others)])}")


def _mistakes(section: Mapping[str, Any], schema: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield a sentence for each key that must not be there, or has a wrong value."""
    for key, value in section.items():
        name = prefix + key
        expected = schema.get(key)
        if name in OWNED_BY_COMMAND_LINE:
            yield f"key '{name}' belongs to the command line: use {OWNED_BY_COMMAND_LINE[name]}."
        elif expected is None:
            yield f"key '{name}' is unknown, or has no effect here.{nearest(key, schema)}"
        elif value == "auto":
            yield f"key '{name}' is 'auto', which is decided by nobody here: give a value."
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
        return (expected == NUMBER and value >= 0) or (expected == "a whole number" and whole)
    return (isinstance(value, str) and expected == TEXT) or (isinstance(value, list) and expected == LIST)
