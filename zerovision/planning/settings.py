"""The settings of the planner's command, with its flags and help."""

from __future__ import annotations

from dataclasses import dataclass

from zerovision.planning.machines import GPUS, SMALLEST_GB
from zerovision.training.base.settings import MOST_GPUS_PER_NODE, MOST_RANKS
from zerovision.training.config import TrainConfig
from zerovision.training.config.command_line import parse_args
from zerovision.training.config.command_settings import CommandSettings, choice, number, switch, text, words_behind
from zerovision.training.engines.strategies import STRATEGIES

GPUS_PER_NODE = 8
GPU_HELP = f"{', '.join(GPUS)}, or a memory size such as 8gb; default: the local GPU."


@dataclass(frozen=True, kw_only=True)
class PlanSettings(CommandSettings):
    """Recommends a strategy before a run, predicts its memory, and prints the command.

    python scripts/plan.py --model-type vgg --num-gpus 8 --gpu h100-80gb
    python scripts/plan.py --model-type timm:vit_large_patch16_224 --num-gpus 16 --gpu a100-40gb --batch-size 64
    python scripts/plan.py --model-type efficientnet --data digits --num-gpus 2 --measure     # this machine

    plan also takes all flags of scripts/train_distributed.py, such as --model-type and --batch-size.
    """

    num_gpus: int = number(1, 1, MOST_RANKS, "Number of GPUs (or CPU ranks) (default: 1).")
    gpus_per_node: int = number(
        0, 1, MOST_GPUS_PER_NODE, f"Number of GPUs per machine (default: at most {GPUS_PER_NODE})."
    )
    gpu: str = text(GPU_HELP, metavar="NAME")
    gpu_memory: float = number(0, SMALLEST_GB, 9999.0, "Memory of each GPU in GB; 8 is the same as --gpu 8gb.")
    measure: bool = switch("Train 20 steps on this machine to time a step.")
    strategy: str = choice("ddp", STRATEGIES, "Strategy to try first (default: ddp).")
    images: int = number(0, 1, 999_999_999, "Training images; default: as in --data, or in ImageNet.")
    classes: int = number(0, 2, 10**6, "Number of classes; default: as in --data, or 1000.")
    with_data: bool = switch("Plan for the default data set, not for ImageNet.")
    json: bool = switch("Print JSON.")
    training_words: tuple[str, ...] = words_behind(takes_trainers=True)

    def config(self) -> TrainConfig:
        """Return the configuration that the trainer's flags describe."""
        own = [f"--strategy={self.strategy}", *([f"--plugin={self.plugin}"] if self.plugin else [])]
        return parse_args([*own, *self.training_words], self.parser().flags)[0]

    def look(self) -> None:
        """See `CommandSettings.look`."""
        self.config()
