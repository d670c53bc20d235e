"""Recommends a strategy before a run, predicts its memory, and prints the command.

python scripts/plan.py --model-type vgg --num-gpus 8 --gpu h100-80gb
python scripts/plan.py --model-type timm:vit_large_patch16_224 --num-gpus 16 --gpu a100-40gb --batch-size 64
python scripts/plan.py --model-type efficientnet --data digits --num-gpus 2 --measure     # this machine
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import NamedTuple

from zerovision.planning.machines import GPUS, SMALLEST_GB
from zerovision.training.base.settings import MOST_GPUS_PER_NODE, MOST_RANKS
from zerovision.training.config import TrainConfig
from zerovision.training.config.command_line import OneLineParser, parse_args
from zerovision.training.engines.strategies import STRATEGIES

GPUS_PER_NODE = 8


class PlanFlags(NamedTuple):
    """A command line of the planner: its own flags, the trainer's flags, and the configuration that they describe."""

    given: Namespace
    others: list[str]
    config: TrainConfig


def read(words: Sequence[str]) -> PlanFlags:
    """Read the command line without importing torch.

    Raises:
        UserError: for anything that cannot be parsed.
    """
    parser = OneLineParser("plan", __doc__)
    parser.add_number("--num-gpus", 1, MOST_RANKS, default=1, help="Number of GPUs (or CPU ranks) (default: 1).")
    parser.add_number(
        "--gpus-per-node", 1, MOST_GPUS_PER_NODE, help=f"Number of GPUs per machine (default: at most {GPUS_PER_NODE})."
    )
    gpus = ", ".join(GPUS)
    parser.add_argument("--gpu", metavar="NAME", help=f"{gpus}, or a memory size such as 8gb; default: the local GPU.")
    parser.add_number("--gpu-memory", SMALLEST_GB, 9999.0, help="Memory of each GPU in GB; 8 is the same as --gpu 8gb.")
    parser.add_argument("--measure", action="store_true", help="Train 20 steps on this machine to time a step.")
    parser.add_choice("--strategy", [*STRATEGIES], default="ddp", help="Strategy to try first (default: ddp).")
    parser.add_number("--images", 1, 999_999_999, help="Training images; default: as in --data, or in ImageNet.")
    parser.add_number("--classes", 2, 10**6, help="Number of classes; default: as in --data, or 1000.")
    parser.add_argument("--with-data", action="store_true", help="Plan for the default data set, not for ImageNet.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.epilog = "plan also takes all flags of scripts/train_distributed.py, such as --model-type and --batch-size."
    given, others = parser.parse_known(words)
    config, _ = parse_args([f"--strategy={given.strategy}", *others], parser.flags)
    return PlanFlags(given, others, config)
