"""`malloc_variables`: what a step frees stays with the process, so that the next step gets it without page faults."""

import resource
import subprocess
import sys

import pytest

from zerovision.launch.node_launcher import malloc_variables

TENSORS, TENSOR_BYTES = 10, 20 * 2**20
SCRIPT = f"""
import ctypes

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
Figures = type("mallinfo2", (ctypes.Structure,), {{"_fields_": [(name, ctypes.c_size_t) for name in FIELDS]}})
libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype, libc.free.argtypes = Figures, ctypes.c_void_p, [ctypes.c_void_p]

def step():
    for pointer in [libc.malloc({TENSOR_BYTES}) for _ in range({TENSORS})]:
        libc.free(pointer)

step(), step()  # malloc raises its own thresholds in the first
print(libc.mallinfo2().fordblks)
"""


# Bytes of malloc's own: a tensor's small allocations may lie above it and keep it from being given back, and how many
# page faults there are is also the kernel's choice.
@pytest.mark.parametrize("keeps", [True, False])
def test_bytes_that_are_kept_after_a_step(keeps):
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **(malloc_variables({}, False) if keeps else {})}
    command = [sys.executable, "-c", SCRIPT]
    kept = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    of_a_step = TENSORS * TENSOR_BYTES
    assert kept >= of_a_step if keeps else kept < of_a_step / 2


@pytest.mark.parametrize("reason", ["a GPU rank", "MALLOC_PERTURB_", "RLIMIT_AS", "RLIMIT_DATA"])
def test_malloc_is_left_alone(monkeypatch, reason):
    limits = {getattr(resource, reason, None): (2**40, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: limits.get(limit, (resource.RLIM_INFINITY,) * 2))
    environment = {reason: "0"} if reason.startswith("MALLOC_") else {}
    assert malloc_variables(environment, has_gpus=reason == "a GPU rank") == {}
