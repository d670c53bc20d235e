"""Names of GPUs and links, what their numbers must obey, and the machine of this process."""

from __future__ import annotations

import pytest

from zerovision.planning.machines import (
    GPUS,
    INTERCONNECTS,
    detect_machine,
    find_gpu,
    find_machine,
    gpu_of_device,
)
from zerovision.training.base.control_groups import usable_memory
from zerovision.training.base.errors import UserError
from zerovision.training.engines.flops import peak_tflops


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("h100", "h100-80gb"),
        ("H100-80GB", "h100-80gb"),
        ("RTX 3090", "rtx3090"),
        ("3090", "rtx3090"),
        ("A100 40GB", "a100-40gb"),
    ],
)
def test_a_gpu_by_any_usual_spelling(given, name):
    assert find_gpu(given) is GPUS[name]


@pytest.mark.parametrize(
    ("given", "gigabytes", "like"),
    [("8gb", 8, "rtx3060"), ("16 GB", 16, "rtx3060"), ("10.5GiB", 10.5, "rtx3060"), ("96gb", 96, "a100-80gb")],
)
def test_any_gpu_by_its_memory(given, gigabytes, like):
    """It computes as the nearest with bf16: a V100 has none, and a card of 16 GB that one buys today does."""
    found = find_gpu(given)
    assert found.memory_bytes == gigabytes * 10**9
    assert (found.peaks, found.bandwidth_bytes_per_s) == (GPUS[like].peaks, GPUS[like].bandwidth_bytes_per_s)
    assert found.name not in GPUS
    assert like in found.source


@pytest.mark.parametrize(
    ("given", "inside", "between"),
    [
        (None, "nvlink4", "ib400"),
        ("nvlink+ib200", "nvlink4", "ib200"),
        ("pcie5", "pcie5", "ib400"),
        ("NVLink4+ethernet25", "nvlink4", "ethernet25"),
    ],
)
def test_links_inside_and_between(given, inside, between):
    machine = find_machine("h100", 8, given)
    assert (machine.inside.name, machine.between.name) == (inside, between)


def test_a_nominal_rate_of_ethernet():
    assert find_machine("a6000", 4, "pcie4+ethernet10").between.bandwidth_bytes_per_s == 10e9 / 8


def test_numbers_that_any_gpu_obeys():
    """A precision with fewer bits is not slower, memory is read within a second, and each number has its source."""
    for gpu in GPUS.values():
        assert gpu.peaks["fp32"] <= gpu.peaks["fp16"]
        assert gpu.peaks.get("bf16", gpu.peaks["fp16"]) == gpu.peaks["fp16"]
        assert ("bf16" in gpu.peaks) == (not gpu.name.startswith("v100"))
        assert 5 < gpu.bandwidth_bytes_per_s / gpu.memory_bytes < 100
        assert gpu.source
    assert all(link.source and 0 < link.latency_s < 1e-3 for link in INTERCONNECTS.values())


@pytest.mark.parametrize(
    ("device", "memory_gb", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 85, "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 42, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 85, "a100-80gb"),
        ("Tesla V100-SXM2-16GB", 17, "v100-16gb"),
        ("NVIDIA RTX A6000", 51, "a6000"),
        ("NVIDIA GeForce RTX 4090", 25, "rtx4090"),
        ("NVIDIA L40S", 48, "l40s"),
    ],
)
def test_a_device_by_pytorchs_name(device, memory_gb, name):
    assert gpu_of_device(device, int(memory_gb * 1e9)) == name
    assert GPUS[name].peaks["fp16"] == peak_tflops(device) * 1e12


@pytest.mark.parametrize("device", ["NVIDIA GeForce RTX 3090 Ti", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla T4"])
def test_another_device_is_planned_for_by_its_memory(device):
    with pytest.raises(UserError, match=r"give --gpu 16gb\."):
        gpu_of_device(device, 16 * 10**9)


def test_a_cpu_rank_has_its_share_of_this_machine(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    machine = detect_machine(ranks=4)
    assert machine.gpu.memory_bytes == usable_memory() // 4
    assert machine.gpu.peaks["fp32"] > 1e8
    assert machine.gpu.bandwidth_bytes_per_s > 1e7
    assert machine.is_cpu
