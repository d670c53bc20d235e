"""Which GPUs there are, which of them is a rank's, and what is said if it can use none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import pretend_gpus

from training.parallel import gpus

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tool", ["", "#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n"], ids=["missing", "broken"])
def test_gpus_are_counted_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    """As in a container with the driver's capability to compute alone, that has GPUs 2 and 10 of its machine."""
    for name in ("nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    if tool:
        (tmp_path / "nvidia-smi").write_text(tool)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "DEVICE_FILES", tmp_path)
    assert gpus.machine_gpus() == ["0", "1"]


def test_nvidia_smi_knows_better_than_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "DEVICE_FILES", tmp_path)
    for count in (3, 0):
        monkeypatch.setenv("PATH", pretend_gpus(tmp_path, count))
        (tmp_path / "nvidia7").touch()
        assert gpus.machine_gpus() == [str(number) for number in range(count)]


DEEPSPEED = """
from tests.training.engine_ranks import configuration, make_engine, make_model
from training.parallel.world import start_world
make_engine(start_world(), make_model(True), configuration(engine="deepspeed"))
import deepspeed
print(deepspeed.accelerator.get_accelerator().device_name(), vars(deepspeed.ops)["__compatible_ops__"])
"""


def test_deepspeed_gets_the_ranks_device_and_looks_for_no_operators() -> None:
    """Also where the environment says otherwise: this rank has no GPU."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cuda", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", DEEPSPEED], env=environment, capture_output=True, text=True)
    assert done.stdout == "cpu {}\n", done.stderr[-3000:]
