"""Counts a model's floating-point operations, and lists the peak rates of GPUs from their vendors' data sheets."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from zerovision.models import ImageSize
from zerovision.models.dry_run import training_flops, without_data

# Words in PyTorch's name of a device -> 10**12 operations per second for dense 16-bit matrix products (BF16; FP16
# before Ampere) that accumulate in FP32, with the source. Data sheets that list twice as much assume sparsity. The
# first entry that matches is used, so longer names come before shorter ones.
PEAK_TFLOPS = {
    "B200": 2250.0,  # NVIDIA DGX B200 data sheet (8 GPUs, 36 PFLOPS with sparsity)
    "H200 NVL": 835.5,  # NVIDIA H200 data sheet (1,671 with sparsity)
    "H200": 989.5,  # NVIDIA H200 data sheet, SXM (1,979 with sparsity)
    "H100 PCIe": 756.0,  # NVIDIA H100 PCIe product brief (1,513 with sparsity)
    "H100 NVL": 835.5,  # NVIDIA H100 data sheet, NVL (1,671 with sparsity)
    "H100": 989.5,  # NVIDIA H100 data sheet, SXM (1,979 with sparsity)
    "A100": 312.0,  # NVIDIA A100 data sheet, PCIe and SXM
    "A40": 149.7,  # NVIDIA A40 data sheet
    "A30": 165.0,  # NVIDIA A30 data sheet
    "A10": 125.0,  # NVIDIA A10 data sheet
    "V100-PCIE": 112.0,  # NVIDIA V100 data sheet, PCIe (FP16)
    "V100S-PCIE": 130.0,  # NVIDIA V100 data sheet, V100S PCIe (FP16)
    "V100": 125.0,  # NVIDIA V100 data sheet, SXM2 (FP16)
    "L40S": 362.05,  # NVIDIA L40S data sheet
    "L40": 181.05,  # NVIDIA L40 data sheet
    "L4": 121.0,  # NVIDIA L4 data sheet (242 with sparsity)
    "T4": 65.0,  # NVIDIA T4 data sheet (FP16)
    "RTX 4090": 165.2,  # NVIDIA Ada GPU architecture whitepaper, appendix A
    "RTX A6000": 154.8,  # NVIDIA Ampere GA102 GPU architecture whitepaper (309.7 with sparsity)
    "RTX 3090": 71.0,  # NVIDIA Ampere GA102 GPU architecture whitepaper
    "RTX 3060": 25.5,  # the RTX 3090's rate per tensor core and clock cycle, with 112 cores at 1.777 GHz
}


class TrainingFlops:
    """Counts the operations of training on one image on first use, which takes about 0.1 s; see `training_flops`."""

    def __init__(self, module: nn.Module, image_size: ImageSize, image_channels: int = 3) -> None:
        """Copy the shapes of a module (see `without_data`) that is trained on images of `image_size` pixels."""
        self._module, self._images = without_data(module), (image_size, image_channels)

    @cached_property
    def per_image(self) -> int | None:
        """The number of operations in forward and backward for one image; None if the model cannot run without data."""
        return training_flops(self._module, *self._images)


def peak_tflops(device_name: str) -> float | None:
    """Return a GPU's peak rate of 16-bit operations, given PyTorch's name for the GPU, or None if the rate is unknown.

    The unit is 10**12 operations per second.
    """
    spaced = f" {' '.join(device_name.replace('-', ' ').split())} "  # so that only whole words match
    if " MIG " in spaced or " Laptop " in spaced:  # a slice of the GPU, or a different chip of the same name
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if f" {name.replace('-', ' ')} " in spaced), None)
