"""Rules of the house that a test can keep."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "models",
    "zerovision/training",
    "zerovision/launch",
    "zerovision/delivery",
    "zerovision/planning",
    "zerovision/extras",
    "zerovision/commands",
    "scripts",
)

# Who may import it, anywhere in the file.
OWNERS = {
    "pickle": {"models/weights_file.py"},  # the name of an error alone
    "deepspeed": {"zerovision/training/engines/deepspeed/engine.py"},
    "peft": {"zerovision/training/recipe/tuning.py"},
    "torch.utils.tensorboard": {"zerovision/training/observe/loggers/tensorboard.py"},
    **{name: {"zerovision/training/observe/loggers/tracker_process.py"} for name in ("wandb", "mlflow", "trackio")},
    **{name: {"zerovision/delivery/export/onnx_format.py"} for name in ("onnx", "onnxruntime", "onnxscript")},
}


def python_files():
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


@functools.cache
def imported_modules(path):
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


# What each folder may import beside itself; models/ also zerovision/training/base.
ARROWS = {
    "models": set(),
    "zerovision/training": {"models"},
    "zerovision/launch": {"zerovision/planning", "zerovision/training", "models"},
    "zerovision/planning": {"zerovision/training", "models"},
    "zerovision/delivery": {"zerovision/training", "models"},
    "zerovision/extras": {*PACKAGES} - {"zerovision/commands", "scripts"},
    "zerovision/commands": {*PACKAGES} - {"scripts"},
    "scripts": {"zerovision/commands"},
}


def folder_of(module):
    """Return the folder of a module of ours; models/ is `zerovision.models` by a link."""
    parts = module.split(".")
    if parts[:2] == ["zerovision", "models"]:
        return "models"
    return "/".join(parts[:2]) if parts[0] == "zerovision" else parts[0]


@pytest.mark.parametrize("folder", ARROWS)
def test_imports_run_one_way(folder):
    assert set(ARROWS) == set(PACKAGES)
    against = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / folder).rglob("*.py")
        for name in imported_modules(path)
        if folder_of(name) in ARROWS.keys() - ARROWS[folder] - {folder}
        and not (folder == "models" and f"{name}.".startswith("zerovision.training.base."))
    }
    assert against == set()


def test_scripts_are_entries_that_nothing_imports():
    importers = {
        str(path) for path in python_files() for name in imported_modules(path) if name.split(".")[0] == "scripts"
    }
    assert importers == set()


# The rooms of training/, the lowest first: a room imports itself and those before it. `config` has the parser, which
# sees all settings; what stands in no room is the root.
ROOMS = ("base", "world", "data", "recipe", "engines", "checkpoint", "tasks", "observe", "steps", "config", "root")


def room_of(path):
    return path.split("/")[2] if path.count("/") > 2 else "root"


def modules_needed(path):
    """Return what a file imports when it runs, without what its annotations alone name."""
    tree = ast.parse(path.read_text())
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_rooms_of_training_stand_one_above_the_other():
    paths = {str(path.relative_to(ROOT)): path for path in (ROOT / "zerovision/training").rglob("*.py")}
    assert {room_of(path) for path in paths} == set(ROOMS)
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in paths}
    against = {
        f"{name} imports {module}"
        for name, path in paths.items()
        for module in modules_needed(path)
        if module in modules and ROOMS.index(room_of(modules[module])) > ROOMS.index(room_of(name))
    }
    assert against == set()


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_has_one_owner(library):
    users = {
        str(path.relative_to(ROOT))
        for path in python_files()
        if any(name == library or name.startswith(library + ".") for name in imported_modules(path))
    }
    assert users == OWNERS[library]


def test_no_rank_unpickles_what_another_sends():
    """PyTorch's collectives of objects do: `gather_objects` and `broadcast_object` take their place."""
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
        *(f"zerovision/training/world/{name}.py" for name in ("launchers", "world", "preserved_process")),
        *(
            "zerovision/commands/train_distributed.py",
            "zerovision/training/base/heartbeat.py",
            "zerovision/training/engines/deepspeed/engine.py",
        ),
        *(f"zerovision/launch/{name}.py" for name in ("launch", "local_ranks", "process_tree")),  # hand it on
        "zerovision/extras/sweep.py",  # hands it on
        "zerovision/training/config/command_line.py",  # rank 0 prints for all
        *(f"zerovision/launch/{name}.py" for name in ("agent", "plan", "hosts")),  # the same
        *(
            "zerovision/launch/slurm.py",
            "zerovision/launch/doctor.py",
            "zerovision/launch/machine_facts.py",
        ),  # Slurm's and ssh's
        *(
            f"zerovision/training/observe/loggers/{name}.py" for name in ("tracker", "tracker_process")
        ),  # the trackers' own
        "zerovision/training/base/run_folder.py",  # whether the user types scripts or `zerovision`
        "zerovision/training/world/gpus.py",  # CUDA_VISIBLE_DEVICES
        "zerovision/training/base/helper_processes.py",  # TMPDIR, and what other Python processes get
    }
    readers = {str(path.relative_to(ROOT)) for path in python_files() if "os.environ" in path.read_text()}
    assert readers <= allowed


def test_test_files_have_names_of_their_own():
    # pytest collects all of them at once for `make test-slow`, and their names are their modules'.
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, files in names.items() if files > 1] == []
