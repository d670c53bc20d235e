"""Names of GPUs, and the machine of this process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zerovision.planning.machines import CPU, GPUS, detect_machine, find_gpu
from zerovision.training.base.control_groups import usable_memory


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


@pytest.mark.parametrize(("given", "gigabytes"), [("8gb", 8), ("16 GB", 16), ("10.5GiB", 10.5), ("96gb", 96)])
def test_any_gpu_by_its_memory(given, gigabytes):
    """With bf16: a V100 has none, and a card of 16 GB that one buys today does."""
    found = find_gpu(given)
    assert found.memory_bytes == gigabytes * 10**9
    assert found.precisions == GPUS["rtx3060"].precisions == ("bf16", "fp16", "fp32")
    assert find_gpu("v100 16gb").precisions == ("fp16", "fp32")
    assert found.name not in GPUS


@pytest.mark.parametrize(("capability", "auto"), [((9, 0), "bf16"), ((7, 5), "fp16")])
def test_this_machines_gpu_whatever_its_name(capability, auto, monkeypatch):
    major, minor = capability
    device = SimpleNamespace(name="NVIDIA Something New", total_memory=85 * 10**9, major=major, minor=minor)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: device)
    machine = detect_machine(ranks=8)
    assert (machine.gpu.name, machine.gpu.memory_bytes, machine.ranks) == (device.name, 85 * 10**9, 8)
    assert machine.gpu.precisions[0] == auto


def test_a_cpu_rank_has_its_share_of_this_machine(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    machine = detect_machine(ranks=4)
    assert machine.gpu.memory_bytes == usable_memory() // 4
    assert machine.gpu.precisions == ("fp32",)
    assert machine.gpu.name == CPU
