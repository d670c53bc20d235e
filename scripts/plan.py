"""Says before a run which strategy to take, whether it fits into memory, and what to type.

python scripts/plan.py --model-type vgg --num-gpus 8 --gpu h100-80gb
python scripts/plan.py --model-type timm:vit_large_patch16_224 --num-gpus 16 --gpu a100-40gb --batch-size 64
python scripts/plan.py --model-type efficientnet --data digits --num-gpus 2 --json     # this machine
python scripts/plan.py --model-type timm:resnet50 --gpu h100-80gb --batch-size 256 --scale 8..4096
python scripts/plan.py --dry-run --world 1024 --model-type mobilenet --data fake --images 1.28M    # set up three ranks
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planning import plan_command
from training.command_line import run_script


def parse(words: list[str]) -> plan_command.PlanRequest:
    """Read the command line."""
    return plan_command.parse(words, __doc__)


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("plan", parse, plan_command.run)


if __name__ == "__main__":
    sys.exit(main())
