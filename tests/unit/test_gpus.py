"""Which GPUs there are, which of them is a rank's, and what is said if it can use none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from launching import pretend_gpus

from zerovision.training.base.errors import UserError
from zerovision.training.world import gpus
from zerovision.training.world.preserved_process import preserved_process
from zerovision.training.world.world import _choose_device, start_world

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
import sys
from tests.training.engine_ranks import configuration, make_engine, make_model
from zerovision.training.world.preserved_process import preserved_process
from zerovision.training.world.world import start_world
make_engine(start_world(), make_model(True), configuration(engine="deepspeed"))
import deepspeed
print(deepspeed.accelerator.get_accelerator().device_name(), vars(deepspeed.ops)["__compatible_ops__"])
print("torch._inductor.ir" in sys.modules)
"""


@pytest.mark.slow
def test_deepspeed_gets_the_ranks_device_looks_for_no_operators_and_imports_no_compiler() -> None:
    """Also where the environment says otherwise: this rank has no GPU."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cuda", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", DEEPSPEED], env=environment, capture_output=True, text=True)
    assert done.stdout == "cpu {}\nFalse\n", done.stderr[-3000:]


NO_DRIVER = pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")


@NO_DRIVER
def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", pretend_gpus(tmp_path, 2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with preserved_process(), pytest.raises(UserError) as refusal:
        start_world()
    said = f"torch {torch.__version__} cannot use the 2 GPU(s) of this machine: Found no NVIDIA driver"
    assert said in str(refusal.value)
    assert "CUDA_VISIBLE_DEVICES= " in str(refusal.value)
    assert "\n" not in str(refusal.value)


@NO_DRIVER
@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_mean_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("PATH", pretend_gpus(tmp_path, 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert _choose_device(0, 2) == torch.device("cpu")


@pytest.fixture
def seen_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that lets torch see some GPUs."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return see


@pytest.mark.parametrize(
    ("visible", "count", "local_rank", "index"),
    [(None, 4, 3, 3), ("2", 1, 3, 0), ("GPU-1b2c", 1, 1, 0), ("4,2", 2, 1, 1)],
)
def test_a_rank_has_the_gpu_that_it_alone_sees(monkeypatch, seen_gpus, visible, count, local_rank, index) -> None:
    """`srun --gpus-per-task=1` lets each task see its own."""
    seen_gpus(count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert _choose_device(local_rank, 4 if count == 1 else count) == torch.device("cuda", index)


@pytest.mark.parametrize(("visible", "count"), [("", 1), ("2,3", 2)])
def test_more_ranks_than_gpus_are_refused(monkeypatch, seen_gpus, visible, count) -> None:
    seen_gpus(count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not visible:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match=f"^4 GPUs asked for, {count} present"):
        _choose_device(1, 4)


def test_ranks_on_one_gpu_are_refused_in_nccls_stead(monkeypatch) -> None:
    """What NCCL says if CUDA_VISIBLE_DEVICES is one GPU, the same for all."""
    error = dist.DistBackendError("ncclInvalidUsage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on")
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=error))
    with preserved_process(), pytest.raises(UserError, match=r"^several ranks were given one GPU[^\n]*$"):
        start_world()
