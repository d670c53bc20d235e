"""`--deterministic` reaches PyTorch's switches before the ranks meet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOOK = """
import json, os, sys, torch
from training.distributed import start_world, stop_world
start_world(deterministic=sys.argv[1] == "yes")
print(json.dumps([torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
                  torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32,
                  torch.backends.cudnn.allow_tf32, os.environ.get("CUBLAS_WORKSPACE_CONFIG")]))
stop_world()
"""


def test_the_switches() -> None:
    for word, expected in (
        ("yes", [True, True, False, True, True, ":4096:8"]),
        ("no", [False, False, True, True, True, None]),
    ):
        command = [sys.executable, "-c", LOOK, word]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
        assert json.loads(result.stdout) == expected
