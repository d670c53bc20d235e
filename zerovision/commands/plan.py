"""Says before a run which strategy to take, whether it fits into memory, and what to type.

python scripts/plan.py --model-type vgg --num-gpus 8 --gpu h100-80gb
python scripts/plan.py --model-type timm:vit_large_patch16_224 --num-gpus 16 --gpu a100-40gb --batch-size 64
python scripts/plan.py --model-type efficientnet --data digits --num-gpus 2 --measure     # this machine
"""

from __future__ import annotations

from zerovision.planning import plan_command


def parse(words: list[str]) -> plan_command.PlanRequest:
    """Read the command line."""
    return plan_command.parse(words, __doc__)
