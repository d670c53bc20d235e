"""GPUs by name, with the memory from their data sheets, the machine of this process, and the flags of the planner.

To support another GPU, add an entry to `GPUS`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zerovision.training.base.control_groups import usable_memory
from zerovision.training.base.errors import UserError, nearest, one_line
from zerovision.training.base.settings import MOST_GPUS_PER_NODE, MOST_RANKS
from zerovision.training.config import TrainConfig
from zerovision.training.config.command_line import parse_args
from zerovision.training.config.command_settings import CommandSettings, choice, number, switch, text, words_behind
from zerovision.training.engines.ways import STRATEGIES

GB = 1e9
SMALLEST_GB = 0.5  # smallest memory of a GPU that can be planned for
CPU = "cpu"  # the name of a CPU rank's share of a machine


@dataclass(frozen=True)
class Gpu:
    """The device of one rank: a GPU, or a CPU rank's share of a machine."""

    name: str  # a value for `--gpu`, the driver's name, or `CPU`
    memory_bytes: int  # with `--gpu`, 10^9 bytes per GB in the data sheet: less than the driver reports
    has_bf16: bool = True  # whether its tensor cores support bf16

    @property
    def precisions(self) -> tuple[str, ...]:
        """The supported precisions; `--precision auto` selects the first."""
        if self.name == CPU:
            return ("fp32",)
        return ("bf16", "fp16", "fp32") if self.has_bf16 else ("fp16", "fp32")


@dataclass(frozen=True)
class Machine:
    """One of a job's identical machines."""

    gpu: Gpu  # the device of each rank
    ranks: int


GPUS = {
    name: Gpu(name, int(memory * GB), has_bf16=not name.startswith("v100"))
    for name, memory in {
        "rtx3060": 12,
        "rtx3090": 24,
        "rtx4090": 24,
        "a6000": 48,
        "v100-16gb": 16,
        "v100-32gb": 32,
        "a100-40gb": 40,
        "a100-80gb": 80,
        "l40s": 48,
        "h100-80gb": 80,
        "h200-141gb": 141,
        "b200-180gb": 180,
    }.items()
}


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its key in `GPUS`; punctuation may differ, and the memory size is optional: 'H100', 'RTX 3090'.

    A size alone, such as '8gb', means any GPU with that memory and bf16. Unknown and ambiguous names raise a UserError.
    """
    if size := re.fullmatch(r"\s*(\d{1,4}(?:\.\d{1,3})?)\s*gi?b\s*", name.lower()):
        gigabytes = float(size[1])
        if gigabytes < SMALLEST_GB:
            raise UserError(f"--gpu {one_line(name, 50)}: expected at least {SMALLEST_GB:g} GB.")
        return Gpu(f"{gigabytes:g}gb", int(gigabytes * GB))
    wanted = re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
    plain = {re.sub(r"[^a-z0-9]", "", key): gpu for key, gpu in GPUS.items()}
    found = [gpu for key, gpu in plain.items() if wanted and (key.startswith(wanted) or key == "rtx" + wanted)]
    if wanted in plain or len(found) == 1:
        return plain.get(wanted) or found[0]
    if found:
        raise UserError(f"--gpu {one_line(name, 50)} is ambiguous: use {' or '.join(gpu.name for gpu in found)}.")
    raise UserError(
        f"unknown --gpu '{one_line(name, 50)}'.{nearest(wanted, GPUS)} Known: {', '.join(GPUS)}; for any "
        "other GPU, use its memory, such as 8gb."
    )


def detect_machine(ranks: int) -> Machine:
    """Return this process's machine for `ranks` ranks: its GPUs, or a CPU rank's share of its memory."""
    import torch  # the planner's flags are read without torch

    from zerovision.training.engines.precision import AMPERE

    if not torch.cuda.is_available():
        return Machine(Gpu(CPU, usable_memory() // ranks), ranks)
    device = torch.cuda.get_device_properties(0)
    return Machine(Gpu(device.name, device.total_memory, (device.major, device.minor) >= AMPERE), ranks)


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
