"""The doctor on one machine: parsing nvidia-smi, and what the machine's facts mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zerovision.planning.doctor import gpu_health, machine
from zerovision.planning.doctor.machine import GIB, MIB
from zerovision.training.observe.environment import code_fingerprint

ROOT = Path(__file__).resolve().parents[2]
WELL_GPU = "NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, 34, 0"
HOT_GPU = "NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, 87, 0"
DESKTOP_GPU = "NVIDIA GeForce RTX 3090, 24576, 5211, 550.54.15, 45, [N/A]"
HEADER = """
Sat Nov 21 20:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
"""


def facts(*of_gpus: str, **changes: Any) -> dict[str, Any]:
    """Facts of a machine that is well, with GPUs or without."""
    return {
        "software": {"Python": "3.11.7", "torch": "2.15.0", "torchvision": "0.29.2+cu132", "code": "1"},
        "import_problem": None,
        "torch_cuda": "12.4",
        "driver_cuda": "12.4",
        "gpus": gpu_health.parse_gpus("\n".join(of_gpus)),
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


def test_nvidia_smi_is_read() -> None:
    gpu, desktop = gpu_health.parse_gpus(f"{WELL_GPU}\n{DESKTOP_GPU}\n")
    assert (gpu["name"], gpu["memory_mib"], gpu["ecc_uncorrected"]) == ("NVIDIA H100 80GB HBM3", 81559, 0)
    assert (desktop["ecc_uncorrected"], desktop["memory_used_mib"]) == (0, 5211)
    assert gpu_health.parse_gpus("No devices were found\n") == []
    assert gpu_health.parse_cuda_version(HEADER) == "12.4"
    newer = "| NVIDIA-SMI 610.57.04              KMD Version: 610.57.04     CUDA UMD Version: 13.3     |"
    assert gpu_health.parse_cuda_version(newer) == "13.3"
    assert gpu_health.parse_cuda_version("NVIDIA-SMI has failed") is None


def test_an_nvidia_smi_that_fails_or_answers_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    tool.chmod(0o755)
    assert "Driver/library version mismatch" in gpu_health.gpu_facts()["gpu_problem"]
    tool.write_text(f"#!/bin/sh\ncase $1 in --query*) echo '{WELL_GPU}';; *) echo 'CUDA Version: 11.8';; esac\n")
    answer = gpu_health.gpu_facts()
    assert (len(answer["gpus"]), answer["driver_cuda"]) == (1, "11.8")


@pytest.mark.parametrize(
    ("given", "ranks", "cluster_has_gpus", "verdict", "said"),
    [
        (facts(WELL_GPU, WELL_GPU), 2, True, "ok", "2 x NVIDIA H100 80GB HBM3"),
        (facts(WELL_GPU), 2, True, "wrong", "2 asked for, 1 x"),
        (facts(), 2, True, "wrong", "no GPU"),
        (facts(WELL_GPU, WELL_GPU, torch_cuda=None), 2, True, "wrong", "CPU build"),
        (facts(WELL_GPU, WELL_GPU, torch_cuda="13.2"), 2, True, "wrong", "runs CUDA 12.4, torch was built for 13.2"),
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
    row = gpu_health.assess_gpus(given, ranks, cluster_has_gpus=cluster_has_gpus)
    assert row.verdict == verdict
    assert said in row.found
    assert bool(row.cure) == (verdict != "ok")


@pytest.mark.parametrize(
    ("given", "verdict", "said"),
    [
        ((WELL_GPU,), "ok", "80 GiB each"),
        ((WELL_GPU, f"{WELL_GPU[:-1]}3"), "wrong", "GPU 1: 3 uncorrected memory errors"),
        ((HOT_GPU,), "warning", "GPU 0: 87 degrees C"),
        ((WELL_GPU, DESKTOP_GPU), "warning", "GPU 1: 5211 MiB taken already"),
    ],
)
def test_a_gpus_health(given: tuple[str, ...], verdict: str, said: str) -> None:
    row = gpu_health.assess_gpu_health(facts(*given))
    assert row is not None
    assert row.verdict == verdict
    assert said in row.found
    assert gpu_health.assess_gpu_health(facts()) is None


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
        *(
            (
                "log folder",
                {"log_folder": {"path": "/logs", "free_bytes": GIB, "problem": None, "saved_bytes": size}},
                4,
                is_ok,
            )
            for size, is_ok in ((GIB, "wrong"), (800 * MIB, "ok"))
        ),
        ("data", {"data": {"problem": "no folder"}}, 4, "wrong"),
        ("data", {"data": {"holds": "2 classes", "hash": "1"}}, 4, "ok"),
    ],
)
def test_limits(check: str, changes: dict[str, Any], all_ranks: int, verdict: str) -> None:
    rows = {row.check: row for row in machine.assess_machine(facts(**changes), 2, all_ranks, cluster_has_gpus=False)}
    assert rows[check].verdict == verdict
    assert bool(rows[check].cure) == (verdict != "ok")
    others = {row.verdict for name, row in rows.items() if name not in (check, "packages")}
    assert others == (
        {"ok"} if changes.get("cores") != 1 else {"ok", "warning"}
    )  # ranks share cores without a quota too


def test_packages_against_requirements() -> None:
    pins = machine.read_pins((ROOT / "requirements.txt").read_text())
    assert pins["torch"].count(".") == 2
    pins = {"torch": "2.15.0", "torchvision": "0.29.2"}
    assert machine.assess_packages(facts(), pins).verdict == "ok"
    older = facts(software={"Python": "3.11.7", "torch": "2.11.0", "torchvision": "0.29.2", "code": "1"})
    assert "torch 2.11.0 for 2.15.0" in machine.assess_packages(older, pins).found
    assert machine.assess_packages(older, pins).verdict == "warning"
    unfit = facts(import_problem="RuntimeError: operator torchvision::nms does not exist")
    assert machine.assess_packages(unfit, pins).verdict == "wrong"
    absent = machine.assess_packages(facts(software={"torch": "none", "torchvision": "0.29.2"}), pins)
    assert (absent.verdict, absent.found) == ("wrong", "not installed: torch")


def test_facts_of_this_machine_are_this_machines(tmp_path: Path) -> None:
    found = machine.machine_facts(str(tmp_path / "new" / "logs"), {"data": "digits"})
    assert found["log_folder"]["problem"] is None
    assert found["data"]["holds"] == "digits: 10 classes, 1437 + 360 images"
    assert found["import_problem"] is None
    assert list(tmp_path.iterdir()) == []
    assert "no folder" in machine.data_facts({"data": str(tmp_path / "none")})["problem"]
    (tmp_path / "logs").write_text("a file where the folder should be")
    assert machine.log_folder_facts(tmp_path / "logs")["problem"]


def test_a_changed_file_changes_the_codes_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.py").write_text("x = 1\n")
    before = code_fingerprint(tmp_path)
    (tmp_path / "models" / "a.pyc").write_text("not code")
    assert code_fingerprint(tmp_path) == before
    (tmp_path / "models" / "a.py").write_text("x = 2\n")
    assert code_fingerprint(tmp_path) != before
