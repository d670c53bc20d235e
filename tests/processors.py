"""Runs the tests that compute floats as other processors compute: `make test-processors`.

PyTorch's kernels, oneDNN's convolutions and MKL's products choose their instructions by the processor, and with them
the order in which they add; threads divide the sums once more. Their variables make this processor choose as another
does that has fewer instructions. What is compared within one processor must hold on each: up to rounding
(`tests/kit.py`), or to the bit where the documentation promises it.

The tests are those of files that compare tensors: of units with one thread and with two, of ranks, which have one
thread each whatever is given, once. Recorded references are left out: `tests/references` compares them to the bit on
the processor that they are from alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROCESSORS = {
    "SSE4.1": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "AVX-512 as of 2017": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},  # without the bf16 and int8 of later ones
}
COMPARES = re.compile(r"assert_close|allclose|assert_same_but_rounding|share_apart|torch\.equal|\bapprox\(")
COMPUTES = re.compile(r"^ *(?:import|from) (?:torch|sklearn|tests\.rounding)\b", re.MULTILINE)
ALSO = "tests/training/test_pipeline.py"  # compares digests
# Without the threads' spinning, which takes the cores of the other process.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}


def files_that_compare(folder: str) -> list[str]:
    """Return the test files of a folder that compute with PyTorch or scikit-learn and compare floats."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).glob("test_*.py"))}
    found = [path for path, text in texts.items() if COMPARES.search(text) and COMPUTES.search(text)]
    return [str(path.relative_to(ROOT)) for path in found]


def main() -> int:
    """Run all, go on after failures, and return 1 if there were any."""
    units, ranks = files_that_compare("tests/unit"), [*files_that_compare("tests/training"), ALSO]
    runs = [(f"{threads} thread(s)", units, ["--dist", "worksteal"], str(threads)) for threads in (1, 2)]
    runs += [("ranks", ranks, ["--dist", "loadfile", "--no-loadscope-reorder"], "1")]
    results = []
    for processor, variables in PROCESSORS.items():
        for name, files, spread, threads in runs:
            print(f"== as on {processor}, {name}: {len(files)} files", flush=True)
            started, environment = time.monotonic(), os.environ | variables | WAITING | {"OMP_NUM_THREADS": threads}
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-n", "2", *spread, *files], cwd=ROOT, env=environment, check=False
            )
            word = "failed" if done.returncode else "passed"
            results.append((word, f"{word} as on {processor}, {name}: {time.monotonic() - started:.0f} s"))
    print("\n".join(line for _, line in results))
    return int(any(word == "failed" for word, _ in results))


if __name__ == "__main__":
    sys.exit(main())
