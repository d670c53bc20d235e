"""What README.md, CONTRIBUTING.md and docs/ name exists: paths, links, commands, flags, keys, imports."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from zerovision.commands import COMMANDS
from zerovision.launch.arguments import SETTINGS
from zerovision.launch.slurm import training_arguments
from zerovision.training.base.errors import UserError
from zerovision.training.config import FLAG_OF
from zerovision.training.config.command_line import parse_args
from zerovision.training.engines.deepspeed.schema import check_deepspeed_json

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
# logs/ is not among them: it holds what runs leave.
OUR_FOLDERS = ("scripts", "zerovision", "models", "docs", "deepspeed_configs", "tests")

FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
LINK = re.compile(r"\]\(([^)\s]+)\)")
OUR_PATH = re.compile(rf"(?:{'|'.join(OUR_FOLDERS)})/[\w./-]*|[\w-]+\.(?:sh|py|md)|Makefile|requirements[\w-]*\.txt")
# The words of each launcher before its flags, by what the training entry calls them; None are the launcher's own.
LAUNCHER_WORDS = {
    "launch_distributed.sh": ("model-type", "strategy", None, "batch-size", "epochs"),
    "launch_multi_node.sh": ("model-type", "strategy", None, None, "batch-size", "epochs"),
    "slurm_distributed.sh": ("model-type", "strategy", None, "batch-size", "epochs"),
}
PROGRAMS_OF_OTHERS = (
    *(
        "deepspeed",
        "torchrun",
        "accelerate",
        "tar",
        "sbatch",
        "srun",
        "scancel",
        "tensorboard",
        "nvidia-smi",
        "trtexec",
    ),
)
# With how many words they take.
LAUNCHER_FLAGS = {"--master_port": 2} | {flag: 1 if field.default is False else 2 for flag, field in SETTINGS.items()}
FLAGS_LEFT_OUT = {"--config": 2, **LAUNCHER_FLAGS}  # not judged: the first names a file of the reader's
ENTRY_FLAGS = {*FLAG_OF.values(), "--config", "--check-config", "--deepspeed", "--help"}


@cache
def verb_flags() -> set[str]:
    help_text = io.StringIO()
    with contextlib.redirect_stdout(help_text):
        for command in COMMANDS.values():
            with contextlib.suppress(SystemExit):
                command.parse(["--help"])
    return set(FLAG.findall(help_text.getvalue()))


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(text: str, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(text) if found == language]


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in a bash block, without comments and leading variables."""
    for line in "\n".join(blocks(text, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            yield words


def slug(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def link_problems(page: Path, text: str) -> Iterator[str]:
    for link in LINK.findall(text):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists():
            yield f"link to {link}: no such file"
        elif anchor and anchor not in map(slug, re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)):
            yield f"link to {link}: no such heading"


def path_problems(text: str) -> Iterator[str]:
    words = [word for span in inline_code(text) for word in span.split()]
    words += [word for command in commands(text) for word in command]
    for word in words:
        if OUR_PATH.fullmatch(word) and not (ROOT / word).exists() and not (ROOT / "scripts" / word).exists():
            yield f"path {word}: does not exist"


def flag_problems(text: str) -> Iterator[str]:
    known = ENTRY_FLAGS | LAUNCHER_FLAGS.keys() | verb_flags()
    for span in inline_code(text):
        if span.split()[0] in PROGRAMS_OF_OTHERS:
            continue
        yield from (f"flag {flag}: does not exist" for flag in FLAG.findall(span) if flag not in known)


def entry_arguments(words: list[str]) -> list[str] | None:
    """Return what a command hands to the training entry, None for a command that trains nothing."""
    names = [Path(word).name for word in words]
    launcher = next((name for name in names if name in LAUNCHER_WORDS), None)
    if launcher:
        given = words[names.index(launcher) + 1 :]
        meanings = LAUNCHER_WORDS[launcher]
        # The launcher asks the planner what auto is, before the training entry sees a strategy.
        given = [
            "ddp" if (meaning, word) == ("strategy", "auto") else word
            for meaning, word in zip(meanings, given, strict=False)
        ] + given[len(meanings) :]
        pairs = zip(meanings, given, strict=False)
        return [f"--{meaning}={value}" for meaning, value in pairs if meaning] + given[len(meanings) :]
    return words[names.index("train_distributed.py") + 1 :] if "train_distributed.py" in names else None


def command_problems(text: str) -> Iterator[str]:
    for words in commands(text):
        shown = shlex.join(words)
        if words[0] == "make" and not make_targets() >= {word for word in words[1:] if "=" not in word}:
            yield f"command {shown}: no such target"
        yield from verb_problems(words)
        arguments = entry_arguments(words)
        if arguments is None or any("<" in word for word in words) or "--help" in words:
            continue
        for flag, length in FLAGS_LEFT_OUT.items():
            if flag in arguments:
                place = arguments.index(flag)
                del arguments[place : place + length]
        try:
            training_arguments(arguments, None) if words[0] == "sbatch" else parse_args(arguments)
        except UserError as error:
            yield f"command {shown}: {error}"


def verb_problems(words: list[str]) -> Iterator[str]:
    """Parse what a command hands to evaluate.py and its like."""
    for place, word in enumerate(words):
        command = COMMANDS.get(Path(word).stem) if word.startswith("scripts/") else None
        if command is not None:
            # What the shell itself reads is not the script's.
            given = words[place + 1 :]
            ends = [number for number, one in enumerate(given) if one in ("<", "|")]
            try:
                command.parse(given[: ends[0]] if ends else given)
            except UserError as error:
                yield f"command {shlex.join(words)}: {error}"


def can_import(module: str, name: str) -> bool:
    """Say whether `from module import name` works."""
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def block_problems(text: str, folder: Path) -> Iterator[str]:
    """Check JSON blocks as DeepSpeed files, YAML blocks as configurations, and the imports of Python blocks."""
    for body in blocks(text, "json"):
        try:
            check_deepspeed_json(json.loads(body), Path("the JSON block"))
        except (UserError, ValueError) as error:
            yield str(error)
    for number, body in enumerate(blocks(text, "yaml")):
        file = folder / f"block{number}.yaml"
        file.write_text(body)
        try:
            parse_args(["--config", str(file)])
        except UserError as error:
            yield str(error)
    for body in blocks(text, "python"):
        imports = [node for node in ast.walk(ast.parse(body)) if isinstance(node, ast.ImportFrom)]
        for name, alias in ((str(node.module), alias.name) for node in imports for alias in node.names):
            if not can_import(name, alias):
                yield f"import of {alias} from {name}: no such name"


def problems(page: Path, folder: Path) -> list[str]:
    text, *_ = page.read_text(encoding="utf-8").partition("\n### Removed\n")  # names what is gone
    found = [*link_problems(page, text), *path_problems(text), *flag_problems(text), *command_problems(text)]
    return [*found, *block_problems(text, folder)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_everything_named_exists(page: Path, tmp_path: Path) -> None:
    assert problems(page, tmp_path) == []


def test_the_checks_find_what_does_not_exist(tmp_path: Path) -> None:
    page = tmp_path / "wrong.md"
    page.write_text(
        """# Wrong
[a](missing.md) [b](#no-heading) [c](#wrong) `zerovision/missing.py` `launch.sh` `--batchsize` `--batch-size`
```bash
DRY_RUN=1 bash scripts/launch_distributed.sh mobilnet ddp 2 16 1    # a comment
torchrun --nproc_per_node=2 scripts/train_distributed.py --epochs 0
bash scripts/launch_multi_node.sh vgg fsdp_stage3 4 8 8 100 --offload all
make trian
python scripts/doctor.py --check DIR
find . | python scripts/predict.py digits - --format xml
```
```json
{"zero_optimisation": {}}
```
```yaml
epoch: 3
```
```python
from zerovision.training.checkpoint.weights import load_weights
```
""",
        encoding="utf-8",
    )
    found = problems(page, tmp_path)
    expected = ["link to missing.md", "link to #no-heading", "path zerovision/missing.py", "path launch.sh"]
    expected += ["flag --batchsize", "launch_distributed.sh mobilnet", "--epochs 0", "trian", "doctor.py --check DIR"]
    expected += ["--format 'xml'", "'zero_optimisation'", "'epoch'"]
    expected += ["import of load_weights"]
    assert len(found) == len(expected), found
    for problem, part in zip(found, expected, strict=True):
        assert part in problem


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_no_line_is_a_wall_of_words(page: Path) -> None:
    assert [line[:60] for line in page.read_text(encoding="utf-8").splitlines() if len(line) > 600] == []
