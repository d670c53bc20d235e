"""The ledger: what was predicted and what was measured then, a JSON line each, and the error bars that follow.

`make ledger` and `make check-memory` measure the CPU part again, `benchmarks/gpu/run.py --parts points` measures GPUs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from planning.machines import Gpu, Machine, detect_machine, machine_of_cpu
from training.observe.control_groups import usable_cores

LEDGER = Path(__file__).with_name("ledger.jsonl")
STEP, MEMORY = KINDS = ("step_s", "memory_bytes")
SAID = {STEP: "step time", MEMORY: "memory"}
# Fields in which entries of the same run may differ.
OF_A_MEASUREMENT = ("predicted", "measured", "peak", "bandwidth", "versions", "date", "product_share")
SHARE_NAMED = 0.8  # of the runs alike: the error that these stay within


@dataclass(frozen=True)
class LedgerEntry:
    """A prediction and its measurement.

    Attributes:
        kind: STEP, or MEMORY for a rank's peak beyond its libraries.
        device: 'cpu', or a key of `planning.machines.GPUS`.
        model: as `--model-type`.
        engine: 'native', 'torch' or 'deepspeed'.
        strategy: as `--strategy`.
        ranks: of the run, on one machine.
        batch_size: images of a rank.
        image_size: pixels.
        classes: of the data set.
        precision: 'fp32', 'bf16' or 'fp16'.
        predicted: seconds or bytes, as the kind says.
        measured: likewise; of steps the median, of ranks the mean.
        peak: operations per second of a rank's share, as the prediction took them.
        bandwidth: bytes per second, likewise.
        machine: cores or GPU.
        versions: of the packages.
        date: of the measurement.
        product_share: as in `planning.machines.Gpu`.
    """

    kind: str
    device: str
    model: str
    engine: str
    strategy: str
    ranks: int
    batch_size: int
    image_size: int
    classes: int
    precision: str
    predicted: float
    measured: float
    peak: float
    bandwidth: float
    machine: str
    versions: str
    date: str
    product_share: float = 1.0

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1


def read_ledger(path: Path = LEDGER) -> list[LedgerEntry]:
    """Return all entries; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [LedgerEntry(**json.loads(line)) for line in lines]


def replace_entries(new: Iterable[LedgerEntry], path: Path = LEDGER) -> None:
    """Write new entries in place of those of the same run."""
    entries = {_run_of(entry): entry for entry in (*read_ledger(path), *new)}
    path.write_text("".join(json.dumps(dataclasses.asdict(entry)) + "\n" for entry in entries.values()))


def error_bar(ledger: Sequence[LedgerEntry], kind: str, device: str, engine: str, strategy: str, ranks: int) -> str:
    """Say how far predictions like this one were off.

    Alike are runs of the same device and engine, and of the same strategy and number of ranks if there are any; else of
    the device.

    Args:
        ledger: the entries.
        kind: as in `LedgerEntry`.
        device: likewise.
        engine: likewise.
        strategy: likewise.
        ranks: likewise.
    """
    alike = [entry for entry in ledger if (entry.kind, entry.device) == (kind, device)]
    for name, value in (("engine", engine), ("strategy", strategy), ("ranks", ranks)):
        alike = [entry for entry in alike if getattr(entry, name) == value] or alike
    if not alike:
        return f"no {SAID[kind]} on {device} has been measured: expect an error of tens of percent"
    errors = sorted(abs(entry.error) for entry in alike)
    within = math.ceil(SHARE_NAMED * len(errors))
    worst = max(alike, key=lambda entry: abs(entry.error))
    unlike = "" if alike[0].engine == engine else f" of another engine, {alike[0].engine}"
    return (
        f"{SAID[kind]} within {errors[within - 1]:.0%} on {within} of {len(errors)} runs like this{unlike}; the worst, "
        f"{worst.model} under {worst.strategy} on {worst.ranks} rank(s) with {worst.image_size} pixels, "
        f"{worst.error:+.0%}"
    )


def this_machine(ranks: int) -> Machine:
    """Return this machine: its GPUs, or a CPU rank's share of it, see `cpu_machine`.

    Raises:
        UserError: if its GPU is in no table.
    """
    return detect_machine(ranks) if torch.cuda.is_available() else cpu_machine(ranks)


def cpu_machine(ranks: int, ledger: Sequence[LedgerEntry] | None = None) -> Machine:
    """Return CPU ranks' share of this machine: as a ledger has it for the same processor, else measured in some 0.2 s.

    Args:
        ranks: that share it.
        ledger: its entries; None for those of the repository.
    """
    here = machine_name()
    known = next((entry for entry in (read_ledger() if ledger is None else ledger) if entry.machine == here), None)
    if known is None:
        return detect_machine(ranks)
    scale = known.ranks / ranks
    peaks, bandwidth = {"fp32": known.peak * scale}, known.bandwidth * scale
    memory, source = psutil.virtual_memory().total // ranks, f"{here}, as in the ledger"
    gpu = Gpu("cpu", memory, bandwidth, peaks, source, known.product_share)
    return machine_of_cpu(gpu, ranks)


def machine_name() -> str:
    """Return cores and processor of this machine, as Linux calls it.

    A hypervisor may hide the processor's name, so its family and model are named too.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = said.get("model name", platform.machine())
    family = f" (family {said['cpu family']}, model {said['model']})" if {"cpu family", "model"} <= said.keys() else ""
    return f"{usable_cores()} cores of {name}{family}"


def _run_of(entry: LedgerEntry) -> tuple[object, ...]:
    return tuple(
        getattr(entry, field.name) for field in dataclasses.fields(entry) if field.name not in OF_A_MEASUREMENT
    )
