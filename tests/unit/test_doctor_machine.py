"""The doctor on one machine: parsing nvidia-smi, and what the machine's facts mean."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from planning.doctor import assess_machine, host_facts
from planning.doctor.assess_machine import GIB, MIB, Need
from training.observe.environment import code_fingerprint

ROOT = Path(__file__).resolve().parents[2]
WELL_GPU = "NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, 34, 700.00, 700.00, 0, 0x0000000000000001"
HOT_GPU = "NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, 87, 500.00, 700.00, 0, 0x0000000000000060"
DESKTOP_GPU = "NVIDIA GeForce RTX 3090, 24576, 5211, 550.54.15, 45, 350.00, 350.00, [N/A], 0x0000000000000004"
HEADER = """
Sat Nov 21 20:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
"""
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\tSYS\t0-47\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\tSYS\t48-95\t1\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""


def facts(*gpus: str, **changes: Any) -> dict[str, Any]:
    """Facts of a machine that is well, with GPUs or without."""
    return {
        "python": "3.11.7",
        "packages": {"torch": "2.15.0", "torchvision": "0.29.2+cu132"},
        "import_problem": None,
        "torch_cuda": "12.4",
        "driver_cuda": "12.4",
        "topology": {},
        "gpus": host_facts.parse_gpus("\n".join(gpus)),
        "cores": 4,
        "cpu_quota": "",
        "memory_bytes": 64 * GIB,
        "memory_free_bytes": 60 * GIB,
        "shm_bytes": 32 * GIB,
        "shm_free_bytes": 32 * GIB,
        "open_files": 65536,
        "compilers": ["c++", "ninja"],
        "log_folder": {"path": "/logs", "free_bytes": 10**12, "problem": None},
        **changes,
    }


def test_nvidia_smi_is_read() -> None:
    gpu, desktop = host_facts.parse_gpus(f"{WELL_GPU}\n{DESKTOP_GPU}\n")
    assert (gpu["name"], gpu["memory_mib"], gpu["ecc_uncorrected"]) == ("NVIDIA H100 80GB HBM3", 81559, 0)
    assert (desktop["ecc_uncorrected"], desktop["power_limit_w"]) == (None, 350)
    assert host_facts.parse_gpus("No devices were found\n") == []
    assert host_facts.parse_cuda_version(HEADER) == "12.4"
    newer = "| NVIDIA-SMI 610.57.04              KMD Version: 610.57.04     CUDA UMD Version: 13.3     |"
    assert host_facts.parse_cuda_version(newer) == "13.3"
    assert host_facts.parse_cuda_version("NVIDIA-SMI has failed") is None
    assert host_facts.parse_topology(TOPOLOGY) == {"NV18": 3, "SYS": 3}


def test_an_nvidia_smi_that_fails_or_is_older_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    tool.chmod(0o755)
    assert "Driver/library version mismatch" in host_facts.ask_nvidia_smi()["gpu_problem"]
    old = "case $1 in *clocks_event*) echo 'Field is not a valid field to query.'; exit 2;;"
    tool.write_text(f"#!/bin/sh\n{old}\n--query*) echo '{WELL_GPU}';; *) echo 'CUDA Version: 11.8';; esac\n")
    answer = host_facts.ask_nvidia_smi()
    assert (len(answer["gpus"]), answer["driver_cuda"]) == (1, "11.8")


ON_GPUS = Need(ranks=2, all_ranks=4, cluster_has_gpus=True)
ON_CPU = Need(ranks=2, all_ranks=4)


@pytest.mark.parametrize(
    ("given", "need", "verdict", "said"),
    [
        (facts(WELL_GPU, WELL_GPU), ON_GPUS, "ok", "2 x NVIDIA H100 80GB HBM3"),
        (facts(WELL_GPU), ON_GPUS, "wrong", "2 asked for, 1 x"),
        (facts(), ON_GPUS, "wrong", "no GPU"),
        (facts(WELL_GPU, WELL_GPU, torch_cuda=None), ON_GPUS, "wrong", "CPU build"),
        (facts(WELL_GPU, WELL_GPU, torch_cuda="13.2"), ON_GPUS, "wrong", "runs CUDA 12.4, torch was built for 13.2"),
        (facts(WELL_GPU, WELL_GPU, torch_cuda="12.9"), ON_GPUS, "ok", ""),
        (facts(gpu_problem="Failed to initialize NVML"), ON_GPUS, "wrong", "Failed to initialize NVML"),
        (facts(), ON_CPU, "ok", "2 CPU ranks over gloo on 4 cores"),
        (facts(), Need(ranks=5), "warning", "5 CPU ranks"),
        (facts(), Need(ranks=33), "wrong", "33 CPU ranks"),
    ],
)
def test_gpus_and_cores_against_what_was_promised(given: Any, need: Need, verdict: str, said: str) -> None:
    row = assess_machine.assess_gpus(given, need)
    assert row.verdict == verdict
    assert said in row.found
    assert bool(row.cure) == (verdict != "ok")


@pytest.mark.parametrize(
    ("gpus", "verdict", "said"),
    [
        ((WELL_GPU,), "ok", "80 GiB each"),
        ((WELL_GPU, WELL_GPU.replace("700.00, 0,", "700.00, 3,")), "wrong", "GPU 1: 3 uncorrected memory errors"),
        ((HOT_GPU,), "warning", "too hot, too hot (hardware); GPU 0: 87 degrees C; GPU 0: limited to 500 of 700 W"),
        ((WELL_GPU, DESKTOP_GPU), "warning", "GPU 1: 5211 MiB taken already"),
    ],
)
def test_a_gpus_health(gpus: tuple[str, ...], verdict: str, said: str) -> None:
    row = assess_machine.assess_gpu_health(facts(*gpus), ON_GPUS)
    assert row is not None
    assert row.verdict == verdict
    assert said in row.found
    assert assess_machine.assess_gpu_health(facts(), ON_CPU) is None


VGG = 138_000_000


@pytest.mark.parametrize(
    ("assess", "changes", "need", "verdict"),
    [
        (assess_machine.assess_memory, {"memory_free_bytes": 3 * GIB}, ON_CPU, "ok"),
        (assess_machine.assess_memory, {"memory_free_bytes": 1.9 * GIB}, ON_CPU, "warning"),
        (assess_machine.assess_shared_memory, {"shm_free_bytes": 64 * MIB}, ON_CPU, "wrong"),  # a container's default
        (assess_machine.assess_shared_memory, {"shm_free_bytes": 133 * MIB}, ON_CPU, "ok"),
        # 2 ranks of one machine share 3 x 552 MB, and take half of what is free at most
        (assess_machine.assess_shared_memory, {"shm_free_bytes": 3.2e9}, Need(2, 2, parameters=VGG), "warning"),
        (assess_machine.assess_shared_memory, {"shm_free_bytes": 3.4e9}, Need(2, 2, parameters=VGG), "ok"),
        (assess_machine.assess_shared_memory, {"shm_free_bytes": 3.2e9}, Need(2, 4, parameters=VGG), "ok"),
        (assess_machine.assess_open_files, {"open_files": 256}, ON_CPU, "warning"),
        (assess_machine.assess_open_files, {"open_files": 1024}, Need(8, 512), "warning"),
        (assess_machine.assess_open_files, {"open_files": 1024}, ON_CPU, "ok"),
        (assess_machine.assess_cpu_quota, {"cpu_quota": "a CPU quota of 1.5 of 64 cores", "cores": 2}, ON_CPU, "ok"),
        (assess_machine.assess_cpu_quota, {"cpu_quota": "a CPU quota of 1 of 64 cores", "cores": 1}, ON_CPU, "warning"),
        (assess_machine.assess_compilers, {"compilers": ["cc", "ninja"]}, ON_CPU, "warning"),
        (assess_machine.assess_compilers, {"compilers": ["g++"]}, ON_CPU, "warning"),
        (assess_machine.assess_compilers, {"compilers": ["g++", "ninja"]}, ON_CPU, "ok"),
    ],
)
def test_limits(assess: Any, changes: dict[str, Any], need: Need, verdict: str) -> None:
    assert assess(facts(**changes), need).verdict == verdict


@pytest.mark.parametrize(
    ("free_bytes", "problem", "verdict"),
    [
        (10**12, None, "ok"),
        (10**12, "Read-only file system", "wrong"),
        (12 * VGG - 1, None, "wrong"),  # one checkpoint: 3 fp32 values a parameter
        (12 * VGG * 5 - 1, None, "warning"),  # 3 kept, the best, and the one being written
        (12 * VGG * 5, None, "ok"),
    ],
)
def test_room_for_checkpoints(free_bytes: int, problem: str | None, verdict: str) -> None:
    folder = {"path": "/logs", "free_bytes": free_bytes, "problem": problem}
    row = assess_machine.assess_log_folder(facts(log_folder=folder), Need(2, 2, parameters=VGG, keep_last=3))
    assert row.verdict == verdict
    assert "/logs" in row.found


def test_packages_against_requirements() -> None:
    pins = assess_machine.read_pins((ROOT / "requirements.txt").read_text())
    assert pins["torch"].count(".") == 2
    pins = {"torch": "2.15.0", "torchvision": "0.29.2"}
    assert assess_machine.assess_packages(facts(), pins).verdict == "ok"
    older = facts(packages={"torch": "2.11.0", "torchvision": "0.29.2"})
    assert "torch 2.11.0 for 2.15.0" in assess_machine.assess_packages(older, pins).found
    assert assess_machine.assess_packages(older, pins).verdict == "warning"
    unfit = facts(import_problem="RuntimeError: operator torchvision::nms does not exist")
    assert assess_machine.assess_packages(unfit, pins).verdict == "wrong"
    absent = assess_machine.assess_packages(facts(packages={"torch": None, "torchvision": "0.29.2"}), pins)
    assert (absent.verdict, absent.found) == ("wrong", "not installed: torch")


def test_a_lock_is_stale_only_where_no_machine_holds_it() -> None:
    assert assess_machine.assess_locks([["/x/lock"], ["/x/lock"]]).verdict == "warning"
    assert assess_machine.assess_locks([["/x/lock"], []]).verdict == "ok"
    assert assess_machine.assess_locks([]).verdict == "ok"


def test_facts_of_this_machine_are_this_machines(tmp_path: Path) -> None:
    found = host_facts.collect_host_facts(
        str(tmp_path / "new" / "logs"), 0, ["localhost", "no.such.host.invalid"], with_torch=False
    )
    assert found["addresses"] == {"localhost": "127.0.0.1", "no.such.host.invalid": None}
    assert found["log_folder"]["problem"] is None
    assert list(tmp_path.iterdir()) == []
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert found["commit"] == (head.stdout.strip() or None)


def test_a_changed_file_changes_the_codes_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.py").write_text("x = 1\n")
    before = code_fingerprint(tmp_path)
    (tmp_path / "models" / "a.pyc").write_text("not code")
    assert code_fingerprint(tmp_path) == before
    (tmp_path / "models" / "a.py").write_text("x = 2\n")
    assert code_fingerprint(tmp_path) != before


def test_a_log_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    assert host_facts.log_folder_facts(tmp_path / "logs")["problem"]
