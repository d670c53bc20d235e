"""What starts quickly, because it imports little: each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from exports import save_new_run

from tests.kit import ROOT
from zerovision.training.data import DataOptions, load_data

# What a script that takes a run is given with a mistyped name.
OF_A_RUN = {
    "evaluate": "TYPO",
    "predict": "TYPO photo.png",
    "export": "TYPO --format onnx",
    "publish": "TYPO my-team/photos",
    "serve": "TYPO",
    "report": "TYPO",
    "replay": "TYPO --step 1",
    "bisect_runs": "TYPO OTHER",
    "audit_data": "digits --run TYPO",
}
MISTYPED = """
import os, runpy, sys
os._exit = sys.exit
for line in sys.argv[1:]:
    sys.argv[:] = line.split()
    try:
        runpy.run_path("scripts/" + sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print(end.code, *{"torch", "timm", "scipy"} & {*sys.modules})
"""
# What is done, and what is not imported for that: all of one process, each after those above it.
LIGHT = {
    "import zerovision.launch.local_ranks": "torch psutil",
    "import zerovision.launch.launch, zerovision.launch.agent, zerovision.launch.slurm": "torch numpy timm",
    "import zerovision.models": "torch timm numpy",
    "import zerovision.training.config.command_line": "torch timm deepspeed",
    "import zerovision.planning.machines": "torch timm",
    "import zerovision.training.data, zerovision.training.data.augmentations": "torch",
    "import zerovision.delivery.report.page, zerovision.delivery.trained_model": "torch",
    "runpy.run_path('scripts/export.py', run_name='__main__')": "torch onnx onnxruntime",
}
HEAVY = {
    "from zerovision.training.checkpoint.weights import load_model; load_model(sys.argv[1])": "deepspeed tensorboard",
    "import zerovision.training.run, zerovision.delivery.evaluation_files, zerovision.training.data.arrays": (
        "scipy sklearn deepspeed"
    ),
}


def test_a_mistyped_run_is_answered_before_the_slow_imports():
    lines = [f"{script}.py {words}" for script, words in OF_A_RUN.items()]
    done = subprocess.run([sys.executable, "-c", MISTYPED, *lines], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "2\n" * len(OF_A_RUN), done.stdout + done.stderr
    for script, line in zip(OF_A_RUN, done.stderr.splitlines(), strict=True):
        assert line.startswith(f"{script}: 'TYPO' is neither a file, nor a folder, nor a run in ")


@pytest.mark.parametrize("steps", [LIGHT, HEAVY], ids=["light", "heavy"])
def test_what_a_module_does_without(steps, tmp_path):
    words = ["--help"]
    if steps is HEAVY:
        save_new_run(tmp_path / "run", load_data(DataOptions(image_size=8)))
        words = [str(tmp_path / "run" / "model.safetensors")]
    program = ["import contextlib, runpy, sys"]
    for code, forbidden in steps.items():
        program += [f"with contextlib.suppress(SystemExit):\n    {code}"]
        program += [f"print('found:', *{{*{forbidden.split()}}} & {{*sys.modules}})"]
    done = subprocess.run([sys.executable, "-c", "\n".join(program), *words], capture_output=True, text=True, cwd=ROOT)
    found = [line for line in done.stdout.splitlines() if line.startswith("found:")]
    assert found == ["found:"] * len(steps), done.stdout + done.stderr
