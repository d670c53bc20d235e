"""GPUs by name, with the memory from their data sheets, and the machine of this process.

To support another GPU, add an entry to `GPUS`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zerovision.training.base.control_groups import usable_memory
from zerovision.training.base.errors import UserError, nearest, one_line

GB = 1e9
SMALLEST_GB = 0.5  # smallest memory of a GPU that can be planned for
CPU = "cpu"  # the name of a CPU rank's share of a machine


@dataclass(frozen=True)
class Gpu:
    """The device of one rank: a GPU, or a CPU rank's share of a machine.

    Attributes:
        name: the value for `--gpu`.
        memory_bytes: memory according to the data sheet, with 10^9 bytes per GB; slightly less than the driver reports.
        has_bf16: whether its tensor cores support bf16.
    """

    name: str
    memory_bytes: int
    has_bf16: bool = True

    @property
    def precisions(self) -> tuple[str, ...]:
        """The supported precisions; `--precision auto` selects the first."""
        if self.name == CPU:
            return ("fp32",)
        return ("bf16", "fp16", "fp32") if self.has_bf16 else ("fp16", "fp32")


@dataclass(frozen=True)
class Machine:
    """One of a job's identical machines.

    Attributes:
        gpu: the device of each rank.
        ranks: number of ranks on the machine.
    """

    gpu: Gpu
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

    A size alone, such as '8gb', means any GPU with that memory and bf16.

    Raises:
        UserError: for an unknown or ambiguous name; the message suggests the nearest name.
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


def detect_machine(ranks: int = 1) -> Machine:
    """Return this process's machine: its GPUs, or a CPU rank's share of its memory.

    Args:
        ranks: number of ranks that share the machine.
    """
    import torch  # the planner's flags are read without torch

    from zerovision.training.engines.precision import AMPERE

    if not torch.cuda.is_available():
        return Machine(Gpu(CPU, usable_memory() // ranks), ranks)
    device = torch.cuda.get_device_properties(0)
    has_bf16 = (device.major, device.minor) >= AMPERE
    return Machine(Gpu(device.name, device.total_memory, has_bf16), ranks)
