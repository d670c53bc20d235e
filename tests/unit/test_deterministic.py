"""PyTorch's switches as a start sets them: no TF32, and `--deterministic`; and the process group on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from zerovision.training.world.world import start_world

ROOT = Path(__file__).resolve().parents[2]
# TF32 is asked for by the environment, and by what PyTorch does by itself for convolutions and LSTMs.
LOOK = """
import json, os, sys, torch
from zerovision.training.world.world import start_world, stop_world
backends = torch.backends
for deterministic in (False, True):
    start_world(deterministic=deterministic)
    fp32 = [backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision]
    print(json.dumps([
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        backends.cudnn.benchmark, os.environ.get("CUBLAS_WORKSPACE_CONFIG"), "tf32" in fp32,
        torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32,
    ]))
    stop_world()
"""


def test_the_switches(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    command = [sys.executable, "-W", "error", "-c", LOOK]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        [False, False, False, None, False, "highest", False],
        [True, True, False, ":4096:8", False, "highest", False],
    ]


class Joined(Exception):
    """Ends a start at the moment in which the process group is joined."""


@pytest.mark.parametrize(("gpus", "expected"), [(2, ("nccl", torch.device("cuda", 1))), (0, ("gloo", None))])
def test_the_process_group_is_bound_to_the_ranks_gpu(monkeypatch, gpus, expected) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    join = mock.Mock(side_effect=Joined)
    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(Joined):
        start_world()
    assert (join.call_args.args[0], join.call_args.kwargs.get("device_id")) == expected
