"""Rules of the house that a test can keep."""

from __future__ import annotations

import ast
import functools
from collections import Counter

from tests.kit import ROOT

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


@functools.cache
def python_files():
    """Return our files as (path below the repository, text, nodes of the syntax tree)."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    return [(name, text, [*ast.walk(ast.parse(text))]) for name, text in texts.items()]


def names_imported(node):
    """Return the modules that an import names, and what it takes from them."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


@functools.cache
def imports():
    """Return all pairs of a file and what it imports, anywhere in it."""
    return [(path, name) for path, _, nodes in python_files() for node in nodes for name in names_imported(node)]


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


def folder_of(path):
    """Return the folder of a file or a module of ours; models/ is `zerovision.models` by a link."""
    parts = path.split("/")
    if parts[:2] == ["zerovision", "models"]:
        return "models"
    return "/".join(parts[:2]) if parts[0] == "zerovision" else parts[0]


def test_imports_run_one_way():
    assert set(ARROWS) == set(PACKAGES)
    against = {
        f"{path} imports {name}"
        for path, name in imports()
        for folder in [folder_of(path)]
        if folder_of(name.replace(".", "/")) in ARROWS.keys() - ARROWS[folder] - {folder}
        and not (folder == "models" and f"{name}.".startswith("zerovision.training.base."))
    }
    assert against == set()


def test_scripts_are_entries_that_nothing_imports():
    assert [path for path, name in imports() if name.split(".")[0] == "scripts"] == []


# The rooms of training/, the lowest first: a room imports itself and those before it. `config` has the parser, which
# sees all settings; what stands in no room is the root.
ROOMS = ("base", "world", "data", "recipe", "engines", "checkpoint", "tasks", "observe", "steps", "config", "root")


def room_of(path):
    return path.split("/")[2] if path.count("/") > 2 else "root"


def test_rooms_of_training_stand_one_above_the_other():
    """What annotations alone name is not needed when a file runs."""
    files = {path: nodes for path, _, nodes in python_files() if path.startswith("zerovision/training/")}
    assert {room_of(path) for path in files} == set(ROOMS)
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}
    against = set()
    for path, nodes in files.items():
        of_types = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        unneeded = {id(node) for branch in of_types for part in branch.body for node in ast.walk(part)}
        needed = {name for node in nodes if id(node) not in unneeded for name in names_imported(node)}
        against |= {
            f"{path} imports {name}"
            for name in needed & modules.keys()
            if ROOMS.index(room_of(modules[name])) > ROOMS.index(room_of(path))
        }
    assert against == set()


def test_a_library_has_one_owner():
    users = {library: {path for path, name in imports() if f"{name}.".startswith(f"{library}.")} for library in OWNERS}
    assert users == OWNERS


# Who holds the manifest of a checkpoint that is read, and what each takes from it.
MANIFEST_READERS = {
    "resume.py: resumed": {"config", "identity", "parameters", "progress"},
    "checkpoint/store.py: restore": {"applied_steps", "loss_scale", "progress"},
    "checkpoint/store.py: _check_content": {"parameters"},
    "checkpoint/store.py: keep_frozen": {"frozen"},
    "checkpoint/shards.py: __init__": {"data_ranks", "parameters"},
    "checkpoint/manifest.py: file_names": {"frozen", "shards"},
    "checkpoint/manifest.py: write_manifest": set(),  # all of it
    "checkpoint/store.py: choose": set(),  # passes it on
    "checkpoint/store.py: commit": set(),  # passes it on
}


def test_one_function_takes_a_runs_settings_from_the_manifest():
    """`resume.resumed`: beside it, only what reads and writes the files of a checkpoint."""
    readers = {}
    for path, _, nodes in python_files():
        for function in (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            parts = [*ast.walk(function)]
            attributes = [node for node in parts if isinstance(node, ast.Attribute)]
            names = {node.arg for node in parts if isinstance(node, ast.arg)} | {node.attr for node in attributes}
            names |= {node.id for node in parts if isinstance(node, ast.Name)}
            words = {str(node.value) for node in parts if isinstance(node, ast.Constant)}  # getattr(found, "manifest")
            is_held = any(node.attr == "manifest" for node in attributes) or "read_manifest" in names
            given = [ast.unparse(node.annotation) for node in parts if isinstance(node, ast.arg) and node.annotation]
            if is_held or "manifest" in words or any("Manifest" in annotation for annotation in given):
                of_it = [node.attr for node in attributes if ast.unparse(node.value).split(".")[-1] == "manifest"]
                readers[f"{path}: {function.name}".removeprefix("zerovision/training/")] = set(of_it)
    assert readers == MANIFEST_READERS


def test_no_rank_unpickles_what_another_sends():
    """PyTorch's collectives of objects do: `gather_objects` and `broadcast_object` take their place."""
    found = []
    for path, _, nodes in python_files():
        for node in nodes:
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name == "Unpickler" or name.endswith(("gather_object", "_object_list")):
                found.append(f"{path}:{node.lineno}")
    assert found == []


def test_names_become_behaviour_in_tables_only():
    """No `if strategy == ...`, no `if model_type == ...`."""
    found = []
    for path, _, nodes in python_files():
        for node in nodes:
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
                words = ast.unparse(node.left)
                if words.endswith(("strategy", "model_type")):
                    found.append(f"{path}:{node.lineno}")
    assert found == []


def test_the_environment_is_read_where_it_belongs():
    training, launch = "zerovision/training", "zerovision/launch"
    allowed = {
        *(f"{training}/world/{name}.py" for name in ("launchers", "world", "preserved_process")),
        *(f"{training}/world/machine.py", f"{training}/base/heartbeat.py"),  # CUDA_VISIBLE_DEVICES; the launch's folder
        *("zerovision/commands/train_distributed.py", f"{training}/engines/deepspeed/engine.py"),
        *(f"{launch}/{name}.py" for name in ("launch", "local_ranks", "process_tree")),  # hand it on
        "zerovision/extras/sweep.py",  # the same
        f"{training}/config/command_line.py",  # rank 0 prints for all
        *(f"{launch}/{name}.py" for name in ("agent", "plan", "hosts")),  # the same
        *(f"{launch}/{name}.py" for name in ("slurm", "doctor", "machine_facts")),  # Slurm's and ssh's
        *(f"{training}/observe/loggers/{name}.py" for name in ("tracker", "tracker_process")),  # the trackers' own
        f"{training}/base/run_folder.py",  # whether the user types scripts or `zerovision`
        f"{training}/base/helper_processes.py",  # TMPDIR, and what other Python processes get
    }
    assert {path for path, text, _ in python_files() if "os.environ" in text} <= allowed


def test_test_files_have_names_of_their_own():
    # pytest collects all of them at once for `make test-slow`, and their names are their modules'.
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, files in names.items() if files > 1] == []
