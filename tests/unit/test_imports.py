"""What starts quickly, because it imports little: each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from exports import save_run

from zerovision.models.build import build_model
from zerovision.training.data import DataOptions, load_data

ROOT = Path(__file__).resolve().parents[2]
EXPORTS_HELP = """
import runpy
sys.argv = ["export.py", "--help"]
try:
    runpy.run_path("scripts/export.py", run_name="__main__")
except SystemExit:
    pass
"""
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
import runpy
sys.argv[:] = {words!r}.split()
try:
    runpy.run_path("scripts/" + sys.argv[0], run_name="__main__")
except SystemExit as end:
    print(end.code)
"""
# Each after those above it, which import less, in one process that has torch and one that has not.
LOAD = "from zerovision.training.checkpoint.weights import load_model; load_model(sys.argv[1])"
NOT_IMPORTED = {
    "import zerovision.models": ("torch", "timm", "numpy"),
    "import zerovision.training.config.command_line": ("torch", "timm", "deepspeed"),
    "import zerovision.planning.flags": ("torch", "timm"),
    "import zerovision.training.data, zerovision.training.data.augmentations": ("torch",),
    "import zerovision.delivery.report.page, zerovision.delivery.trained_model": ("torch",),
    EXPORTS_HELP: ("torch", "onnx", "onnxruntime"),
    "import zerovision.training.run, zerovision.delivery.end_of_run, zerovision.training.data.arrays": (
        "scipy",
        "sklearn",
        "deepspeed",
    ),
    LOAD: ("deepspeed", "tensorboard"),
}


@pytest.mark.parametrize("script", OF_A_RUN)
def test_a_mistyped_run_is_answered_before_the_slow_imports(script):
    code = MISTYPED.format(words=f"{script}.py {OF_A_RUN[script]}")
    program = f"import sys, os\nos._exit = sys.exit\n{code}\nprint([*{{'torch', 'timm', 'scipy'}} & {{*sys.modules}}])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "2\n[]\n", done.stdout + done.stderr
    assert done.stderr.startswith(f"{script}: 'TYPO' is neither a file, nor a folder, nor a run in ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("code", NOT_IMPORTED, ids=lambda code: code.split("\n")[0] or "export.py --help")
def test_what_a_module_does_without(code, tmp_path):
    if code == LOAD:
        built = build_model("basic_cnn", num_classes=10, image_size=8)
        save_run(tmp_path / "run", built, load_data(DataOptions(image_size=8)))
    words = [str(tmp_path / "run" / "model.safetensors"), " ".join(NOT_IMPORTED[code])]
    program = "\n".join(["import sys", "forbidden = sys.argv.pop().split()", code])
    program += "\nprint([name for name in forbidden if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr
