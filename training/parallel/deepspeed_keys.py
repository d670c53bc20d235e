"""DeepSpeed's own configuration keys that a run refuses: what stands in their place, and which keys are real at all."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

# Keys that DeepSpeed knows but the command line owns, with the flag to use instead.
OWNED_BY_COMMAND_LINE = {
    "train_batch_size": "--batch-size, --gradient-accumulation-steps and the number of GPUs",
    "train_micro_batch_size_per_gpu": "--batch-size",
    "gradient_accumulation_steps": "--gradient-accumulation-steps",
    "gradient_clipping": "--gradient-clipping",
    "optimizer": "--optimizer, --learning-rate and --weight-decay",
    "scheduler": "--warmup-epochs and --final-learning-rate-scale",
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
# Where DeepSpeed keeps the names of its keys: constants, fields of its configuration classes, and their aliases.
_CONFIGURATION_FILES = re.compile(r"(.*_)?(config|constants)\.py")
_KEY = re.compile(r"[a-z][a-z0-9_]*")


def why_refused(name: str) -> str | None:
    """Return a sentence, without its full stop, on a key of DeepSpeed's that no file may have; None for any other key.

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
    """Return the names that the installed DeepSpeed's configuration knows, of all sections together.

    They are read from its source, without importing it, which takes seconds and may fail on a machine that only
    checks a file. A few of its other words are among them; a real key never is missing.
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
