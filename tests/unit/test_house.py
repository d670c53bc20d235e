"""Rules of the house that a test can keep."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("models", "training", "delivery", "planning", "scripts")

# Who may import it, anywhere in the file.
OWNERS = {
    "pickle": {"models/weights_file.py"},  # the name of an error alone
    "deepspeed": {"training/deepspeed_engine.py"},
    "torch.utils.tensorboard": {"training/loggers/tensorboard.py"},
    "onnx": {f"delivery/export/{name}.py" for name in ("int8", "onnx_format", "onnx_graph", "quantizer")},
    "onnxruntime": {f"delivery/export/{name}.py" for name in ("onnx_session", "quantizer")},
    "onnxscript": {"delivery/export/onnx_graph.py"},
}


def python_files():
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_has_one_owner(library):
    users = {
        str(path.relative_to(ROOT))
        for path in python_files()
        if any(name == library or name.startswith(library + ".") for name in imported_modules(path))
    }
    assert users == OWNERS[library]


def test_no_rank_unpickles_what_another_sends():
    """PyTorch's collectives of objects do: `training/exchange.py` takes their place."""
    found = []
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name == "Unpickler" or name.endswith(("gather_object", "_object_list")):
                found.append(f"{path}:{node.lineno}")
    assert found == []


def test_names_become_behaviour_in_tables_only():
    """No `if strategy == ...`, no `if model_type == ...`."""
    found = []
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
                words = ast.unparse(node.left)
                if words.endswith(("strategy", "model_type")):
                    found.append(f"{path}:{node.lineno}")
    assert found == []


def test_the_environment_is_read_where_it_belongs():
    allowed = {
        *("training/distributed.py", "training/deepspeed_engine.py", "scripts/train_distributed.py"),
        *("scripts/supervise.py", "scripts/local_ranks.py"),  # which hand it on
        "delivery/command_line.py",  # rank 0 speaks for all
        *(f"scripts/cluster/{name}.py" for name in ("agent", "plan", "remote_shell")),  # the same
        *("scripts/cluster/slurm_job.py", "scripts/doctor.py", "planning/doctor/network.py"),  # Slurm's and ssh's
    }
    readers = {str(path.relative_to(ROOT)) for path in python_files() if "os.environ" in path.read_text()}
    assert readers <= allowed
