"""Where the package and its files are, in a checkout and in an installed copy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).absolute().parents[2]  # not resolved: models/ is a link
# None: an installed copy.
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "scripts" / "train_distributed.py").is_file() else None
SHARED_MEMORY = Path("/dev/shm")  # of all processes of a machine
REPO_ROOT = CHECKOUT or PACKAGE  # with requirements.txt and deepspeed_configs/
ENTRIES = CHECKOUT / "scripts" if CHECKOUT else PACKAGE / "commands"
LAUNCH = PACKAGE / "launch"
PRESET_FOLDER = PACKAGE / "presets"
TYPED = "ZEROVISION_COMMAND"  # set by the command `zerovision`, for its ranks too
SCRIPTS = {"audit": "audit_data", "bisect": "bisect_runs"}  # of verbs with another name
VERBS = {script: verb for verb, script in SCRIPTS.items()}
EXTRAS = {  # of pyproject.toml, and the modules in them that are imported where they are needed
    "deepspeed": ("deepspeed",),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "audit": ("sklearn",),
    "lora": ("peft",),
    "parquet": ("pyarrow",),
    "remote": ("fsspec", "aiohttp"),
}
TRAINER = "-m zerovision.commands.train_distributed"
AS_A_COMMAND: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [  # in a checkout, and otherwise
    (r"bash (?:scripts/)?(?:launch_distributed|launch_multi_node)\.sh", "zerovision launch"),
    (r"(deepspeed .*?)scripts/train_distributed\.py", r"\1--module zerovision.commands.train_distributed"),
    (r"((?:torchrun|accelerate launch) .*?)scripts/train_distributed\.py", rf"\1{TRAINER}"),
    (r"(?:python )?scripts/train_distributed\.py", f"python {TRAINER}"),
    (r"(torchrun .*?)scripts/(\w+)\.py", r"\1-m zerovision.commands \2"),
    (r"(?:python )?scripts/(\w+)\.py", lambda found: f"zerovision {VERBS.get(found[1], found[1])}"),
    (r"(?:scripts/)?(?:launch_distributed|launch_multi_node)\.sh", "zerovision launch"),
]


def as_typed(text: str) -> str:
    """Return a text with its commands in the form for this copy: `zerovision evaluate`, or a checkout's script."""
    if not CHECKOUT or os.environ.get(TYPED):
        for script, command in AS_A_COMMAND:
            text = re.sub(script, command, text)
    return text


def cure_of_missing(module: str) -> str:
    """Return what to type if a module cannot be imported; for an installed copy, the extra that contains it."""
    if CHECKOUT:
        return "run 'make setup', and use .venv/bin/python instead of python"
    extra = next((name for name, modules in EXTRAS.items() if module.partition(".")[0] in modules), "")
    return f"pip install '{f'zerovision[{extra}]' if extra else module}'"


def log_folder() -> Path:
    """Return the folder for the files of runs: logs/ in the checkout, or in the current folder."""
    return (CHECKOUT or Path.cwd()) / "logs"
