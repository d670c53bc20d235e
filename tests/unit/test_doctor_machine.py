"""The doctor on one machine: what NVML says, and what the machine's facts mean."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from zerovision.launch import assess, machine_facts
from zerovision.launch.assess import GIB, MIB
from zerovision.training.observe.environment import code_fingerprint

ROOT = Path(__file__).resolve().parents[2]
H100 = "NVIDIA H100 80GB HBM3"
WELL_GPU = {"name": H100, "memory_mib": 81559, "memory_used_mib": 4, "temperature_c": 34, "ecc_uncorrected": 0}
HOT_GPU = WELL_GPU | {"temperature_c": 87}
DESKTOP_GPU = WELL_GPU | {"memory_mib": 24576, "memory_used_mib": 5211}


def facts(*of_gpus: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Facts of a machine that is well, with GPUs or without."""
    return {
        "software": {"Python": "3.11.7", "torch": "2.15.0", "torchvision": "0.29.2+cu132", "code": "1"},
        "import_problem": None,
        "torch_cuda": "12.4",
        "driver_cuda": "12.4",
        "gpus": list(of_gpus),
        "driver": "550.54.15",
        "gpu_problem": "",
        "cores": 4,
        "cpu_quota": "",
        "memory_bytes": 64 * GIB,
        "memory_free_bytes": 60 * GIB,
        "shm_bytes": 32 * GIB,
        "shm_free_bytes": 32 * GIB,
        "open_files": 65536,
        "log_folder": {"path": "/logs", "free_bytes": 10**12, "problem": None},
        "data": {},
        **changes,
    }


def nvml_error(code: int) -> None:
    raise pynvml.NVMLError(code)


NVML = {  # of a server's GPU, and a desktop's without ECC
    "nvmlInit": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "550.54.15",
    "nvmlSystemGetCudaDriverVersion_v2": lambda: 12040,
    "nvmlDeviceGetCount": lambda: 2,
    "nvmlDeviceGetHandleByIndex": lambda number: number,
    "nvmlDeviceGetName": lambda gpu: (H100, "NVIDIA GeForce RTX 3090")[gpu],
    "nvmlDeviceGetMemoryInfo": lambda gpu, version: {  # the first version counts what the driver reserves as used
        pynvml.nvmlMemory_v2: SimpleNamespace(total=(81559, 24576)[gpu] * MIB, used=(4, 5211)[gpu] * MIB)
    }[version],
    "nvmlDeviceGetTemperature": lambda gpu, sensor: 34,
    "nvmlDeviceGetTotalEccErrors": lambda gpu, *_: nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED) if gpu else 3,
}


def test_what_nvml_says_of_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in NVML.items():
        monkeypatch.setattr(pynvml, name, function)
    found = machine_facts.gpu_facts()
    assert (found["driver"], found["driver_cuda"], found["gpu_problem"]) == ("550.54.15", "12.4", "")
    server, desktop = found["gpus"]
    assert server == WELL_GPU | {"ecc_uncorrected": 3}
    assert (desktop["ecc_uncorrected"], desktop["memory_used_mib"]) == (0, 5211)


@pytest.mark.parametrize(
    ("failure", "said"),
    [(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, ""), (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "RM has detected")],
)
def test_an_nvml_that_is_absent_or_fails_is_understood(
    failure: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: nvml_error(failure))
    found = machine_facts.gpu_facts()
    assert said in found["gpu_problem"]
    assert (bool(found["gpu_problem"]), found["gpus"]) == (bool(said), [])


@pytest.mark.parametrize(
    ("given", "ranks", "cluster_has_gpus", "verdict", "said"),
    [
        (facts(WELL_GPU, WELL_GPU), 2, True, "ok", "2 x NVIDIA H100 80GB HBM3"),
        (facts(WELL_GPU), 2, True, "wrong", "2 requested, 1 x"),
        (facts(), 2, True, "wrong", "no GPU"),
        (facts(WELL_GPU, WELL_GPU, torch_cuda=None), 2, True, "wrong", "CPU build"),
        (facts(WELL_GPU, WELL_GPU, torch_cuda="13.2"), 2, True, "wrong", "CUDA 12.4, but torch was built for 13.2"),
        (facts(WELL_GPU, WELL_GPU, torch_cuda="12.9"), 2, True, "ok", ""),
        (facts(gpu_problem="Failed to initialize NVML"), 2, True, "wrong", "Failed to initialize NVML"),
        (facts(), 2, False, "ok", "2 CPU ranks over gloo on 4 cores"),
        (facts(), 5, False, "warning", "5 CPU ranks"),
        (facts(), 33, False, "wrong", "33 CPU ranks"),
    ],
)
def test_gpus_and_cores_against_what_was_promised(
    given: Any, ranks: int, cluster_has_gpus: bool, verdict: str, said: str
) -> None:
    row = assess.assess_gpus(given, ranks, cluster_has_gpus=cluster_has_gpus)
    assert row.verdict == verdict
    assert said in row.found
    assert bool(row.cure) == (verdict != "ok")


@pytest.mark.parametrize(
    ("given", "verdict", "said"),
    [
        ((WELL_GPU,), "ok", "80 GiB each"),
        ((WELL_GPU, WELL_GPU | {"ecc_uncorrected": 3}), "wrong", "GPU 1: 3 uncorrected memory errors"),
        ((HOT_GPU,), "warning", "GPU 0: 87 degrees C"),
        ((WELL_GPU, DESKTOP_GPU), "warning", "GPU 1: 5211 MiB already in use"),
    ],
)
def test_a_gpus_health(given: tuple[dict[str, Any], ...], verdict: str, said: str) -> None:
    (row,) = assess.assess_gpu_health(given)
    assert row.verdict == verdict
    assert said in row.found
    assert assess.assess_gpu_health([]) == []


@pytest.mark.parametrize(
    ("check", "changes", "all_ranks", "verdict"),
    [
        ("memory", {"memory_free_bytes": 3 * GIB}, 4, "ok"),
        ("memory", {"memory_free_bytes": 1.9 * GIB}, 4, "warning"),
        ("/dev/shm", {"shm_free_bytes": 64 * MIB}, 4, "wrong"),  # a container's default
        ("/dev/shm", {"shm_free_bytes": 133 * MIB}, 4, "ok"),
        ("open files", {"open_files": 256}, 4, "warning"),
        ("open files", {"open_files": 1024}, 512, "warning"),
        ("open files", {"open_files": 1024}, 4, "ok"),
        ("cores", {"cpu_quota": "a CPU quota of 1.5 of 64 cores", "cores": 2}, 4, "ok"),
        ("cores", {"cpu_quota": "a CPU quota of 1 of 64 cores", "cores": 1}, 4, "warning"),
        ("log folder", {}, 4, "ok"),
        ("log folder", {"log_folder": {"path": "/logs", "free_bytes": 99 * MIB, "problem": None}}, 4, "wrong"),
        ("log folder", {"log_folder": {"path": "/logs", "free_bytes": 10**12, "problem": "Read-only"}}, 4, "wrong"),
        ("log folder", {"log_folder": {"path": "/logs", "free_bytes": 900 * MIB, "problem": None}}, 4, "ok"),
        ("log folder", {"log_folder": {"path": "/logs", "free_bytes": 899 * MIB, "problem": None}}, 4, "wrong"),
        ("data", {"data": {"problem": "no folder"}}, 4, "wrong"),
        ("data", {"data": {"holds": "2 classes", "hash": "1"}}, 4, "ok"),
    ],
)
def test_limits(check: str, changes: dict[str, Any], all_ranks: int, verdict: str) -> None:
    found = assess.assess_machine(facts(**changes), 2, all_ranks, cluster_has_gpus=False, saved_bytes=800 * MIB)
    rows = {row.check: row for row in found}
    assert rows[check].verdict == verdict
    assert bool(rows[check].cure) == (verdict != "ok")
    others = {row.verdict for name, row in rows.items() if name not in (check, "packages")}
    # Ranks share cores without a quota too.
    assert others == ({"ok"} if changes.get("cores") != 1 else {"ok", "warning"})


def test_packages_against_requirements() -> None:
    ancient = assess.assess_packages(facts(software={"torch": "0.1"}), (ROOT / "requirements.txt").read_text())
    assert re.search(r"torch 0\.1, not \d+\.\d+\.\d+$", ancient.found)
    pins = "torch==2.15.0\ntorchvision==0.29.2\n"
    assert assess.assess_packages(facts(), pins).verdict == "ok"
    older = facts(software={"Python": "3.11.7", "torch": "2.11.0", "torchvision": "0.29.2", "code": "1"})
    assert "torch 2.11.0, not 2.15.0" in assess.assess_packages(older, pins).found
    assert assess.assess_packages(older, pins).verdict == "warning"
    unfit = facts(import_problem="RuntimeError: operator torchvision::nms does not exist")
    assert assess.assess_packages(unfit, pins).verdict == "wrong"
    absent = assess.assess_packages(facts(software={"torch": "none", "torchvision": "0.29.2"}), pins)
    assert (absent.verdict, absent.found) == ("wrong", "not installed: torch")


def test_facts_of_this_machine_are_this_machines(tmp_path: Path) -> None:
    order = {"log_dir": str(tmp_path / "new" / "logs"), "data": {"data": "digits"}, "training": None}
    found = machine_facts.machine_facts("here", order)
    assert found["log_folder"]["problem"] is None
    assert found["data"]["holds"] == "digits: 10 classes, 1437 + 360 images"
    assert found["import_problem"] is None
    assert list(tmp_path.iterdir()) == []
    assert "no folder" in machine_facts.data_facts({"data": str(tmp_path / "none")}, None)["problem"]
    (tmp_path / "logs").write_text("a file where the folder should be")
    assert machine_facts.log_folder_facts(tmp_path / "logs")["problem"]


def test_a_changed_file_changes_the_codes_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.py").write_text("x = 1\n")
    before = code_fingerprint(tmp_path)
    (tmp_path / "models" / "a.pyc").write_text("not code")
    assert code_fingerprint(tmp_path) == before
    (tmp_path / "models" / "a.py").write_text("x = 2\n")
    assert code_fingerprint(tmp_path) != before
