"""`malloc_variables`: what a step frees, the next step gets without page faults."""

import resource
import subprocess
import sys

import pytest

from launch.node_launcher import malloc_variables

TENSORS, TENSOR_BYTES, PAGE_BYTES = 10, 20 * 2**20, 4096
FAULTS_OF_A_STEP = TENSORS * TENSOR_BYTES // PAGE_BYTES
SCRIPT = f"""
import ctypes, resource, torch

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.zeros({TENSOR_BYTES} // 4) for _ in range({TENSORS})]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages would hide the faults
faults_of_a_step(), faults_of_a_step()  # pieces of the first are cut and joined again in the second
print(faults_of_a_step() + faults_of_a_step())
"""


@pytest.mark.parametrize("keeps", [True, False])
def test_page_faults_of_the_third_and_fourth_step(keeps):
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **(malloc_variables({}, False) if keeps else {})}
    command = [sys.executable, "-c", SCRIPT]
    found = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert found < FAULTS_OF_A_STEP / 2 if keeps else found > FAULTS_OF_A_STEP / 2


@pytest.mark.parametrize("reason", ["a GPU rank", "MALLOC_PERTURB_", "RLIMIT_AS", "RLIMIT_DATA"])
def test_malloc_is_left_alone(monkeypatch, reason):
    limits = {getattr(resource, reason, None): (2**40, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: limits.get(limit, (resource.RLIM_INFINITY,) * 2))
    environment = {reason: "0"} if reason.startswith("MALLOC_") else {}
    assert malloc_variables(environment, has_gpus=reason == "a GPU rank") == {}
