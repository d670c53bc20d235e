"""GPUs and interconnects by name, from their data sheets, and the machine that this process runs on.

A new GPU or interconnect is one entry of `GPUS` or `INTERCONNECTS`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from zerovision.training.base.control_groups import limit_threads, usable_cores, usable_memory
from zerovision.training.base.errors import UserError, nearest, one_line
from zerovision.training.engines.flops import PEAK_TFLOPS, peak_tflops

GB, TERA = 1e9, 1e12
NCCL_LATENCY = "latency of a ring's hop: NCCL, src/graph/tuning.cc, hwLat (Ring, Simple)"
IB_SHARE = 0.96  # 12 of 12.5 GB/s: NCCL, src/graph/topo.h
TCP_SHARE = 0.94  # payload of a frame: 1448 of 1538 bytes
IMAGES, CHANNELS, PIXELS = 16, 128, 16  # of a convolution in the middle of a network
COPY_BYTES = 64 * 2**20
REPEATS = 6
SMALLEST_GB = 0.5  # of a GPU that is planned for
CPU = "cpu"  # the name of a CPU rank's share


@dataclass(frozen=True)
class Gpu:
    """What one rank computes with: a GPU, or a CPU rank's share of a machine.

    Attributes:
        name: as `--gpu` takes it.
        memory_bytes: the data sheet's GB as 10^9 bytes: a little less than the driver reports.
        bandwidth_bytes_per_s: of its memory.
        peaks: dense operations per second of matrix products by precision, accumulated in fp32: 'fp32' without tensor
            cores, 'bf16', 'fp16'; a precision that the GPU lacks is absent. Of a CPU those of convolutions.
        source: of these numbers.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    peaks: Mapping[str, float] = dataclasses.field(hash=False)
    source: str


@dataclass(frozen=True)
class Interconnect:
    """A link that a ring of ranks goes over.

    Attributes:
        name: as `--interconnect` takes it.
        latency_s: of one hop of a collective.
        bandwidth_bytes_per_s: of one GPU in one direction, by the data sheet.
        source: of these numbers.
        achieved_share: of the bandwidth that collectives reach: NCCL, src/graph/topo.h, has 20.6 GB/s of 25 for a link
            of NVLink 4, 20 for older ones, 12 of 15.75 for PCIe 3; 1 for a measured bandwidth.
    """

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    source: str
    achieved_share: float = 0.8

    @property
    def rate(self) -> float:
        """Bytes per second that collectives reach."""
        return self.bandwidth_bytes_per_s * self.achieved_share


@dataclass(frozen=True)
class Machine:
    """Equal machines of a job.

    Attributes:
        gpu: of each rank.
        ranks: on each machine.
        inside: link between the ranks of a machine.
        between: link between machines.
        rank_cores: of a CPU rank: a part of one if there are more ranks than cores.
    """

    gpu: Gpu
    ranks: int
    inside: Interconnect
    between: Interconnect
    rank_cores: float = 1.0

    @property
    def is_cpu(self) -> bool:
        """Whether the ranks compute on a CPU."""
        return self.gpu.name == CPU


def _gpu(name: str, memory: float, bandwidth: float, fp32: float, peak16: str, source: str) -> Gpu:
    """Build a GPU from GB, GB/s, TFLOP/s, and its key in `PEAK_TFLOPS`; all but Volta's have bf16."""
    half = PEAK_TFLOPS[peak16] * TERA
    peaks = {"fp32": fp32 * TERA, "fp16": half} | ({} if peak16 == "V100" else {"bf16": half})
    return Gpu(name, int(memory * GB), bandwidth * GB, peaks, source)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("rtx3060", 12, 360, 12.7, "RTX 3060", "NVIDIA RTX 3060 page; tensor cores as GA102 per SM and clock"),
        _gpu("rtx3090", 24, 936, 35.6, "RTX 3090", "NVIDIA Ampere GA102 GPU architecture whitepaper, table 9"),
        _gpu("rtx4090", 24, 1008, 82.6, "RTX 4090", "NVIDIA Ada GPU architecture whitepaper, appendix A"),
        _gpu("a6000", 48, 768, 38.7, "RTX A6000", "NVIDIA RTX A6000 data sheet; GA102 whitepaper, appendix A"),
        _gpu("v100-16gb", 16, 900, 15.7, "V100", "NVIDIA V100 data sheet, SXM2"),
        _gpu("v100-32gb", 32, 900, 15.7, "V100", "NVIDIA V100 data sheet, SXM2"),
        _gpu("a100-40gb", 40, 1555, 19.5, "A100", "NVIDIA A100 data sheet, 40 GB"),
        _gpu("a100-80gb", 80, 2039, 19.5, "A100", "NVIDIA A100 data sheet, 80 GB SXM"),
        _gpu("l40s", 48, 864, 91.6, "L40S", "NVIDIA L40S data sheet"),
        _gpu("h100-80gb", 80, 3350, 67.0, "H100", "NVIDIA H100 data sheet, SXM"),
        _gpu("h200-141gb", 141, 4800, 67.0, "H200", "NVIDIA H200 data sheet, SXM"),
        _gpu("b200-180gb", 180, 7700, 75.0, "B200", "NVIDIA HGX B200 data sheet"),
    )
}
INTERCONNECTS = {
    link.name: link
    for link in (
        Interconnect("nvlink2", 3.4e-6, 150 * GB, f"NVIDIA V100 data sheet (300 GB/s both ways); {NCCL_LATENCY}"),
        Interconnect("nvlink3", 3.4e-6, 300 * GB, f"NVIDIA A100 data sheet (600 GB/s both ways); {NCCL_LATENCY}"),
        Interconnect("nvlink4", 3.4e-6, 450 * GB, f"NVIDIA H100 data sheet (900 GB/s both ways); {NCCL_LATENCY}"),
        Interconnect("nvlink5", 3.4e-6, 900 * GB, f"NVIDIA HGX B200 data sheet (1.8 TB/s both ways); {NCCL_LATENCY}"),
        Interconnect("pcie3", 5.7e-6, 15.75 * GB, f"PCI Express 3.0, 16 lanes; {NCCL_LATENCY}"),
        Interconnect("pcie4", 5.7e-6, 31.5 * GB, f"PCI Express 4.0, 16 lanes; {NCCL_LATENCY}"),
        Interconnect("pcie5", 5.7e-6, 63 * GB, f"PCI Express 5.0, 16 lanes; {NCCL_LATENCY}"),
        Interconnect("ib100", 9.6e-6, 12.5 * GB, f"InfiniBand EDR, a port per GPU; {NCCL_LATENCY}", IB_SHARE),
        Interconnect("ib200", 9.6e-6, 25 * GB, f"InfiniBand HDR, a port per GPU; {NCCL_LATENCY}", IB_SHARE),
        Interconnect("ib400", 9.6e-6, 50 * GB, f"InfiniBand NDR, a port per GPU; {NCCL_LATENCY}", IB_SHARE),
    )
}
ETHERNET_LATENCY_S = 50e-6  # of TCP between machines of one switch
# The fastest link inside a machine that is usual with a GPU; between machines, if none is named.
USUAL_LINK = {"v100": "nvlink2", "a100": "nvlink3", "h100": "nvlink4", "h200": "nvlink4", "b200": "nvlink5"}
USUAL_NETWORK = "ib400"


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its key in `GPUS`, also with other punctuation or without its memory, as 'H100' or 'RTX 3090'.

    A number of GB alone, such as '8gb', is any GPU with so much memory: it computes as the one of them with 16-bit
    tensor cores that is nearest in memory.

    Raises:
        UserError: for an unknown name, or one of several, with the nearest.
    """
    if size := re.fullmatch(r"\s*(\d{1,4}(?:\.\d{1,3})?)\s*gi?b\s*", name.lower()):
        return _gpu_of_memory(float(size[1]), name)
    wanted = re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
    plain = {re.sub(r"[^a-z0-9]", "", key): gpu for key, gpu in GPUS.items()}
    found = [gpu for key, gpu in plain.items() if wanted and (key.startswith(wanted) or key == "rtx" + wanted)]
    if wanted in plain or len(found) == 1:
        return plain.get(wanted) or found[0]
    if found:
        raise UserError(f"--gpu {one_line(name, 50)} is one of several: give {' or '.join(gpu.name for gpu in found)}.")
    raise UserError(
        f"unknown --gpu '{one_line(name, 50)}'.{nearest(wanted, GPUS)} Known: {', '.join(GPUS)}; any other "
        "by its memory, such as 8gb."
    )


def _gpu_of_memory(gigabytes: float, given: str) -> Gpu:
    if gigabytes < SMALLEST_GB:
        raise UserError(f"--gpu {one_line(given, 50)}: give at least {SMALLEST_GB:g} GB.")
    modern = [gpu for gpu in GPUS.values() if "bf16" in gpu.peaks]
    near = min(modern, key=lambda gpu: abs(gpu.memory_bytes - gigabytes * GB))
    source = f"of the memory alone; times are those of {near.name}"
    return dataclasses.replace(near, name=f"{gigabytes:g}gb", memory_bytes=int(gigabytes * GB), source=source)


def find_interconnect(name: str) -> Interconnect:
    """Return a link by its key in `INTERCONNECTS`, or 'ethernet<Gbit/s>', such as ethernet25.

    Raises:
        UserError: for an unknown name, with the nearest.
    """
    ethernet = re.fullmatch(r"ethernet(\d{1,4}(?:\.\d{1,3})?)", name)
    if ethernet and float(ethernet[1]) > 0:
        rate = float(ethernet[1]) * GB / 8
        return Interconnect(
            name, ETHERNET_LATENCY_S, rate, "Ethernet's nominal rate, a port per rank; TCP latency", TCP_SHARE
        )
    if name not in INTERCONNECTS:
        known = [*INTERCONNECTS, "ethernet10", "ethernet25", "ethernet100"]
        hint = nearest(name, known)
        raise UserError(f"unknown --interconnect '{one_line(name, 50)}'.{hint} Known: {', '.join(known)}.")
    return INTERCONNECTS[name]


def find_machine(gpu: str, ranks: int, interconnect: str | None = None) -> Machine:
    """Return machines of `ranks` GPUs each.

    Args:
        gpu: a name for `find_gpu`.
        ranks: on each machine.
        interconnect: inside a machine and between machines, as 'nvlink4+ib400', or the first alone; 'nvlink' is the
            GPU's own; None for what is usual with it: NVLink on the boards that have it, else PCIe 4.

    Raises:
        UserError: for unknown names.
    """
    found = find_gpu(gpu)
    usual = USUAL_LINK.get(found.name.partition("-")[0], "pcie4")
    inside, _, between = (interconnect or usual).lower().partition("+")
    inside = usual if inside == "nvlink" and usual.startswith(inside) else inside
    return Machine(found, ranks, find_interconnect(inside), find_interconnect(between or USUAL_NETWORK))


def detect_machine(ranks: int = 1) -> Machine:
    """Return the machine that this process runs on: its GPUs, or a CPU rank's share, measured in some 0.2 s.

    Args:
        ranks: that share it.

    Raises:
        UserError: if its GPU is in no table.
    """
    if not torch.cuda.is_available():
        share = _measure_cpu(ranks)
        # Ranks that share memory exchange at the rate of a copy, gloo at a twentieth of it: between the two.
        link = Interconnect("shared-memory", 20e-6, share.bandwidth_bytes_per_s, "a copy, measured", 0.2)
        return Machine(share, ranks, link, find_interconnect("ethernet10"), usable_cores() / ranks)
    properties = torch.cuda.get_device_properties(0)
    machine = find_machine(gpu_of_device(properties.name, properties.total_memory), ranks)
    peak16 = (peak_tflops(properties.name) or 0) * TERA  # of its very form, such as a PCIe card
    peaks = {key: peak16 if key in ("bf16", "fp16") and peak16 else peak for key, peak in machine.gpu.peaks.items()}
    gpu = dataclasses.replace(machine.gpu, memory_bytes=properties.total_memory, peaks=peaks)
    return dataclasses.replace(machine, gpu=gpu)


def gpu_of_device(device_name: str, memory_bytes: int) -> str:
    """Return the key in `GPUS` for a device as PyTorch names it, the one nearest in memory of those with its name.

    Raises:
        UserError: if none has its name.
    """
    words = re.sub(r"[^a-z0-9]+", " ", device_name.lower()).replace("rtx ", "rtx").replace("rtxa", "a").split()
    found = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in words]
    if not found or "mig" in words or "laptop" in words or "ti" in words:
        device = one_line(device_name, 80)
        raise UserError(
            f"this machine's {device} is not in zerovision/planning/machines.py: give --gpu {memory_bytes / GB:.0f}gb."
        )
    return min(found, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes)).name


@functools.cache  # one process, one machine: what it says twice agrees
def _measure_cpu(ranks: int) -> Gpu:
    """Measure a convolution and a copy, of which each rank gets as much as its cores do.

    What counts are the core seconds of this process on all its cores: what other processes run meanwhile, such as the
    training that is to be predicted, does not.
    """

    def core_seconds(work: Callable[[], object]) -> float:
        return min(timeit.repeat(work, timer=time.process_time, number=1, repeat=REPEATS))

    limit_threads()
    images = torch.rand(IMAGES, CHANNELS, PIXELS, PIXELS).contiguous(memory_format=torch.channels_last)
    weights = torch.rand(CHANNELS, CHANNELS, 3, 3).contiguous(memory_format=torch.channels_last)
    source, target = torch.zeros(COPY_BYTES // 4), torch.zeros(COPY_BYTES // 4)
    share = usable_cores() / ranks
    convolution_s = core_seconds(lambda: torch.conv2d(images, weights, padding=1))
    convolved = share * 2 * IMAGES * (3 * CHANNELS * PIXELS) ** 2 / convolution_s
    copy_s = core_seconds(lambda: target.copy_(source))
    bandwidth = share * 2 * COPY_BYTES / copy_s  # a byte read and a byte written
    memory = usable_memory() // ranks
    text = f"measured on {usable_cores()} cores shared by {ranks} ranks"
    return Gpu(CPU, memory, bandwidth, {"fp32": convolved}, text)
