"""Says before a run which strategy to take, whether it fits into memory, and what to type.

python scripts/plan.py --model-type vgg --num-gpus 8 --gpu h100-80gb
python scripts/plan.py --model-type timm:vit_large_patch16_224 --num-gpus 16 --gpu a100-40gb --batch-size 64
python scripts/plan.py --model-type efficientnet --data digits --num-gpus 2 --measure     # this machine
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from zerovision.training.config.command_line import run_script

if TYPE_CHECKING:
    from zerovision.planning.plan_command import PlanRequest


# Imported late: outside the environment `run_script` says in one line what is missing.
def parse(words: list[str]) -> PlanRequest:
    """Read the command line."""
    from zerovision.planning.plan_command import parse

    return parse(words, __doc__)


def plan(request: PlanRequest) -> int:
    """Print what was asked for; return the exit code."""
    from zerovision.planning.plan_command import run

    return run(request)


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("plan", parse, plan)


if __name__ == "__main__":
    sys.exit(main())
