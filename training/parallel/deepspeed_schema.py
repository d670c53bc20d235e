"""A strict check of a user's DeepSpeed JSON, before DeepSpeed's own lenient one.

DeepSpeed ignores misspelt top-level keys (`zero_optimisation` silently trains at stage 0) and reads some `auto`
values as false; here each gets one line with file and key.
Key names and types follow DeepSpeed's configuration reference (https://www.deepspeed.ai/docs/config-json/).
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from training.errors import UserError, nearest

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
# Keys whose effect every run has, or cannot have, with the reason.
WITHOUT_EFFECT = {
    "zero_allow_untested_optimizer": "it is always true, since the optimizers are timm's",
    "zero_force_ds_cpu_optimizer": "it is always false, since the optimizers are timm's",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "model.safetensors always holds the whole weights",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "model.safetensors always holds the whole weights",
    "zero_optimization.load_from_fp32_weights": "checkpoints always hold the weights in fp32",
    "zero_optimization.elastic_checkpoint": "checkpoints go on under any number of ranks",
    "zero_optimization.cpu_offload_use_pin_memory": "offload_optimizer and offload_param have pin_memory",
    "dataloader_drop_last": "no image is dropped: the last step is filled up with images of weight 0",
    "gradient_allreduce_op": "the gradient is always the mean over the images of a step",
    "wandb": "metrics.jsonl has all numbers",
    "csv_monitor": "metrics.jsonl has all numbers",
    "comet": "metrics.jsonl has all numbers",
}
# DeepSpeed's keys are constants, fields of its configuration classes, and aliases of those, in these files.
_CONFIGURATION_FILES = re.compile(r"(.*_)?(config|constants)\.py")
_KEY = re.compile(r"[a-z][a-z0-9_]*")


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
        if expected is None or name in OWNED_BY_COMMAND_LINE:
            refusal = why_refused(name)
            yield f"{refusal}." if refusal else f"unknown key '{name}'.{nearest(key, schema)}"
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


def why_refused(name: str) -> str | None:
    """Return why a key of DeepSpeed's is refused, without a full stop; None for a key that is not DeepSpeed's.

    Args:
        name: with its sections, such as 'zero_optimization.cpu_offload'.
    """
    if name in OWNED_BY_COMMAND_LINE:
        return f"key '{name}' belongs to the command line: use {OWNED_BY_COMMAND_LINE[name]}"
    if name in WITHOUT_EFFECT:
        return f"key '{name}' is not needed: {WITHOUT_EFFECT[name]}"
    if name.rpartition(".")[2] in installed_keys():
        return f"key '{name}' is DeepSpeed's, but nothing here uses it: remove it"
    return None


@cache
def installed_keys() -> frozenset[str]:
    """Return the keys that the installed DeepSpeed's configuration accepts, of all sections together.

    They are read from its source without importing it: an import takes seconds, and may fail on a machine that only
    checks a file. A few names that are no keys are among them; no key is missing.
    """
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return frozenset()
    names: set[str] = set()
    for path in Path(spec.origin).parent.rglob("*.py"):
        if _CONFIGURATION_FILES.fullmatch(path.name) and "inference" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names.add(node.value)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id)
    return frozenset(name for name in names if _KEY.fullmatch(name))
