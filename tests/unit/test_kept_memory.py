"""`keep_freed_memory`: what a step frees, the next step gets without page faults."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TENSORS, TENSOR_BYTES, PAGE_BYTES = 10, 20 * 2**20, 4096
FAULTS_OF_A_STEP = TENSORS * TENSOR_BYTES // PAGE_BYTES
SCRIPT = f"""
import ctypes, resource, sys, torch
from training.memory_guard import keep_freed_memory

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.zeros({TENSOR_BYTES} // 4) for _ in range({TENSORS})]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if len(sys.argv) > 2:
    resource.setrlimit(resource.__dict__[sys.argv[2]], (2**40, resource.RLIM_INFINITY))
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages would hide the faults
keep_freed_memory(torch.device(sys.argv[1]))
faults_of_a_step()
print(faults_of_a_step() + faults_of_a_step())
"""


@pytest.mark.parametrize(
    ("words", "variables", "keeps"),
    [
        (["cpu"], {}, True),
        (["cpu"], {"MALLOC_PERTURB_": "0"}, False),
        pytest.param(["cpu", "RLIMIT_AS"], {}, False, marks=pytest.mark.slow),
        (["cpu", "RLIMIT_DATA"], {}, False),
        (["cuda"], {}, False),
    ],
    ids=["a-cpu-rank", "a-variable-of-malloc", "ulimit-v", "ulimit-d", "a-gpu-rank"],
)
def test_page_faults_of_the_second_and_third_step(words, variables, keeps):
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", SCRIPT, *words]
    found = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert found < FAULTS_OF_A_STEP / 2 if keeps else found > FAULTS_OF_A_STEP / 2
