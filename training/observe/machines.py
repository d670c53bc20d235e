"""What machines can do at best, by the vendors' data sheets."""

from __future__ import annotations

from typing import NamedTuple


class DevicePeak(NamedTuple):
    """A device's peak of matrix products in 16 bits (BF16; FP16 before Ampere), dense, accumulated in FP32.

    Attributes:
        name: words that PyTorch's name of the device holds.
        tflops: 10**12 operations per second. Sheets that give twice as much assume sparsity.
        source: where the number stands.
    """

    name: str
    tflops: float
    source: str


# The first line that fits holds: longer names before shorter ones.
DEVICE_PEAKS = (
    DevicePeak("B200", 2250.0, "NVIDIA DGX B200 data sheet (8 GPUs, 36 PFLOPS with sparsity)"),
    DevicePeak("H200 NVL", 835.5, "NVIDIA H200 data sheet (1,671 with sparsity)"),
    DevicePeak("H200", 989.5, "NVIDIA H200 data sheet, SXM (1,979 with sparsity)"),
    DevicePeak("H100 PCIe", 756.0, "NVIDIA H100 PCIe product brief (1,513 with sparsity)"),
    DevicePeak("H100 NVL", 835.5, "NVIDIA H100 data sheet, NVL (1,671 with sparsity)"),
    DevicePeak("H100", 989.5, "NVIDIA H100 data sheet, SXM (1,979 with sparsity)"),
    DevicePeak("A100", 312.0, "NVIDIA A100 data sheet, PCIe and SXM"),
    DevicePeak("A40", 149.7, "NVIDIA A40 data sheet"),
    DevicePeak("A30", 165.0, "NVIDIA A30 data sheet"),
    DevicePeak("A10", 125.0, "NVIDIA A10 data sheet"),
    DevicePeak("V100-PCIE", 112.0, "NVIDIA V100 data sheet, PCIe (FP16)"),
    DevicePeak("V100S-PCIE", 130.0, "NVIDIA V100 data sheet, V100S PCIe (FP16)"),
    DevicePeak("V100", 125.0, "NVIDIA V100 data sheet, SXM2 (FP16)"),
    DevicePeak("L40S", 362.05, "NVIDIA L40S data sheet"),
    DevicePeak("L40", 181.05, "NVIDIA L40 data sheet"),
    DevicePeak("L4", 121.0, "NVIDIA L4 data sheet (242 with sparsity)"),
    DevicePeak("T4", 65.0, "NVIDIA T4 data sheet (FP16)"),
    DevicePeak("RTX 4090", 165.2, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    DevicePeak("RTX 3090", 71.0, "NVIDIA Ampere GA102 GPU architecture whitepaper"),
)


def peak_tflops(device_name: str) -> float | None:
    """Return the 16-bit peak in 10**12 operations per second of a device as PyTorch names it; None where unknown."""
    words = device_name.replace("-", " ").split()
    if "MIG" in words or "Laptop" in words:  # a slice of the device; another chip of the same name
        return None
    for peak in DEVICE_PEAKS:
        wanted = peak.name.replace("-", " ").split()
        if any(words[start : start + len(wanted)] == wanted for start in range(len(words))):
            return peak.tflops
    return None
