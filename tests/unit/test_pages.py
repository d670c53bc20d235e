"""The pages of README.md, CONTRIBUTING.md and docs/: their commands parse, what they name exists, the site builds."""

from __future__ import annotations

import ast
import importlib
import json
import logging
import multiprocessing
import os
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from tests.pages import PAGES as WRITTEN
from tests.pages import parser_of
from zerovision import cli
from zerovision.cli import VERBS, WORDS_OF_ONE_MACHINE
from zerovision.commands import COMMANDS
from zerovision.launch.arguments import LAUNCHERS, SETTINGS
from zerovision.launch.slurm import training_arguments
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import SCRIPTS
from zerovision.training.config import FLAG_OF
from zerovision.training.config.command_line import parse_args
from zerovision.training.engines.deepspeed import check_deepspeed_json

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs" / "index.md",
    *sorted((ROOT / "docs").glob("*/*.md")),
]
LONGEST_LINE, MOST_WORDS = 600, 20_000  # of pages for users, blocks of code apart
OUR_FOLDERS = ("scripts", "zerovision", "models", "docs", "deepspeed_configs", "tests", "benchmarks", "records")

FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
LINK = re.compile(r"\]\(([^)\s]+)\)")
OUR_PATH = re.compile(rf"(?:{'|'.join(OUR_FOLDERS)})/[\w./-]*|[\w-]+\.(?:sh|py|md)|Makefile|requirements[\w-]*\.txt")
# What the training entry calls a launcher's arguments; the others are the launcher's own.
TRAINER_NAMES = {"model": "model-type", "strategy": "strategy", "batch_size": "batch-size", "epochs": "epochs"}
PROGRAMS_OF_OTHERS = {
    *("deepspeed", "torchrun", "accelerate", "sbatch", "srun", "squeue", "scancel", "tensorboard", "nvidia-smi"),
    *("trtexec", "tar", "npm", "cp", "cd", "source", "tail", "watch", "find", "git", "pip", "uv", "docker", "kubectl"),
    *("python", "python3", ".venv/bin/python", "bash", "make", "zerovision", "mlflow", "trackio", "wandb", "sky"),
    *("ssh", "rsync", "kill", "cat", "jq", "module", "apt-get", "unzip", "wget", "curl", "export", "mkdir", "ls"),
}
FLAGS_LEFT_OUT = {  # with how many words they take; --config names a file of the reader's
    "--config": 2,
    "--master_port": 2,
    **{flag: 1 if field.default is False else 2 for flag, field in SETTINGS.items()},
}


@cache
def known_flags() -> set[str]:
    of_verbs = {flag for name in COMMANDS for flag in parser_of(name).flags}
    more = {"--config", "--check-config", "--deepspeed", "--help", "--version"}
    return {*FLAG_OF.values(), *FLAGS_LEFT_OUT, *of_verbs, *more}


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language, also those inside list items."""
    found = ((indent, body) for indent, name, body in FENCE.findall(text) if name == language)
    return [re.sub(f"^{indent}", "", body, flags=re.MULTILINE) for indent, body in found]


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in a bash block, without comments and leading variables."""
    for line in re.sub(r"\\\n", " ", "\n".join(blocks(text, "bash"))).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            yield words


def slug(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def link_problems(page: Path, text: str) -> Iterator[str]:
    for link in LINK.findall(FENCE.sub("", text)):
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
        # A name alone may be the reader's own file.
        if OUR_PATH.fullmatch(word) and "/" in word and not (ROOT / word).exists():
            yield f"path {word}: does not exist"


def flag_problems(text: str) -> Iterator[str]:
    for span in inline_code(text):
        if span.split()[0] not in PROGRAMS_OF_OTHERS - {"zerovision", "bash", "python"}:
            yield from (f"flag {flag}: does not exist" for flag in FLAG.findall(span) if flag not in known_flags())


def trainer_arguments(words: list[str]) -> list[str] | None:
    """Return what a command hands to the training entry, None for a command that trains nothing."""
    names = [Path(word).name for word in words]
    if "train_distributed.py" in names:
        return words[names.index("train_distributed.py") + 1 :]
    launcher, given = next((name for name in names if name in LAUNCHERS), None), words
    if words[:2] == ["zerovision", "launch"]:
        given = words[1:]
        leading = next((count for count, word in enumerate(given[1:]) if word.startswith("-")), len(given) - 1)
        launcher = "launch_multi_node.sh" if leading > WORDS_OF_ONE_MACHINE else "launch_distributed.sh"
        names = [launcher]
    if launcher is None:
        return None
    given = given[names.index(launcher) + 1 :]
    meanings = LAUNCHERS[launcher].positional.split()
    # The launcher asks the planner what auto is, before the training entry sees a strategy.
    pairs = [
        (name, "ddp" if (name, word) == ("strategy", "auto") else word)
        for name, word in zip(meanings, given, strict=False)
    ]
    positional = [f"--{TRAINER_NAMES[name]}={word}" for name, word in pairs if name in TRAINER_NAMES]
    return positional + given[len(meanings) :]


def command_problems(text: str) -> Iterator[str]:
    """Parse every command that is ours; the programs of others must be known ones."""
    for words in commands(text):
        shown = shlex.join(words)
        if words[0] not in PROGRAMS_OF_OTHERS:
            yield f"command {shown}: unknown program {words[0]}"
        if words[0] == "make" and not make_targets() >= {word for word in words[1:] if "=" not in word}:
            yield f"command {shown}: no such target"
        if "--plugin" in words:
            yield from plugin_problems(words)
            continue
        yield from verb_problems(words)
        arguments = trainer_arguments(words)
        if arguments is None or any("<" in word for word in words) or "--help" in words:
            continue
        for flag, length in FLAGS_LEFT_OUT.items():
            while flag in arguments:
                place = arguments.index(flag)
                del arguments[place : place + length]
        try:
            training_arguments(arguments, None) if words[0] == "sbatch" else parse_args(arguments)
        except UserError as error:
            yield f"command {shown}: {error}"


def plugin_problems(words: list[str]) -> Iterator[str]:
    """Let a launcher check a command in a fork, because a plugin changes our tables."""
    fork = multiprocessing.get_context("fork").Process(target=check_by_launcher, args=(words[1:],))
    fork.start()
    fork.join()
    if fork.exitcode:
        yield f"command {shlex.join(words)}: exit code {fork.exitcode}, and its error is on standard error"


def check_by_launcher(words: list[str]) -> None:
    os.chdir(ROOT)
    os.environ["DRY_RUN"], sys.argv = "1", ["zerovision", *words]
    sys.exit(cli.main())


def verb_problems(words: list[str]) -> Iterator[str]:
    """Parse what a command hands to `zerovision VERB`, and to evaluate.py and its like."""
    for place, word in enumerate(words):
        name = Path(word).stem if word.startswith("scripts/") else None
        if place and words[place - 1] == "zerovision":
            if word not in VERBS and word != "--version":
                yield f"command {shlex.join(words)}: no verb {word}"
            name = SCRIPTS.get(word, word)
        if name in COMMANDS:
            given = words[place + 1 :]
            ends = [number for number, one in enumerate(given) if one in ("<", "|", ">", "&&")]  # the shell's
            try:
                COMMANDS[name].parse(given[: ends[0]] if ends else given)
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
        nodes = [*ast.walk(ast.parse(body))]
        found = [(str(one.module), name.name) for one in nodes if isinstance(one, ast.ImportFrom) for name in one.names]
        uses = [one for one in nodes if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)]
        found += [("zerovision", one.attr) for one in uses if ast.unparse(one.value) == "zerovision"]
        for module, name in found:
            if not can_import(module, name):
                yield f"import of {name} from {module}: no such name"


def problems(page: Path, folder: Path) -> list[str]:
    text, *_ = page.read_text(encoding="utf-8").partition("\n## Removed\n")  # names what is gone
    found = [*link_problems(page, text), *path_problems(text), *flag_problems(text), *command_problems(text)]
    found += [f"line of {len(line)} characters: {line[:60]}" for line in text.splitlines() if len(line) > LONGEST_LINE]
    return [*found, *block_problems(text, folder)]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in WRITTEN], ids=lambda page: page.stem)
def test_everything_named_exists(page: Path, tmp_path: Path) -> None:
    assert problems(page, tmp_path) == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_written_pages_are_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == WRITTEN[page](), "run: .venv/bin/python -m tests.pages"


def test_pages_for_users_are_short() -> None:
    pages = [page for page in PAGES if page.name == "README.md" or page.parent.name not in ("dev", ROOT.name)]
    texts = [FENCE.sub("", page.read_text(encoding="utf-8")) for page in pages if page not in WRITTEN]
    words = sum(any(map(str.isalnum, word)) for text in texts for word in text.split())
    assert words <= MOST_WORDS, "move measurements and history to docs/dev/"


def build_site(site: Path, **changes: str) -> None:
    """Build the site as `make docs` does.

    Raises:
        Abort: for a warning.
    """
    logging.getLogger("mkdocs").setLevel(logging.WARNING)
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(site), **changes))


def test_the_site_builds_and_needs_no_network(tmp_path: Path) -> None:
    build_site(tmp_path / "site")
    for page in (tmp_path / "site").rglob("*.html"):
        fetched = re.findall(r"<(?:link|script|img)[^>]*(?:href|src)=\"(https?://[^\"]+)", page.read_text())
        assert fetched == [], page


@pytest.mark.parametrize("link", ["two.md", "#two", "../outside.md"])
def test_a_dead_link_stops_the_build(tmp_path: Path, link: str) -> None:
    (docs := tmp_path / "docs").mkdir()
    (docs / "index.md").write_text(f"# One\n\n[two]({link})\n")
    with pytest.raises(Abort):
        build_site(tmp_path / "site", docs_dir=str(docs), nav=None)


def test_the_checks_find_what_does_not_exist(tmp_path: Path) -> None:
    page = tmp_path / "wrong.md"
    page.write_text(
        """# Wrong
[a](missing.md) [b](#no-heading) [c](#wrong) `zerovision/missing.py` `--batchsize` `--batch-size`
```bash
DRY_RUN=1 bash scripts/launch_distributed.sh mobilnet ddp 2 16 1    # a comment
torchrun --nproc_per_node=2 scripts/train_distributed.py --epochs 0
bash scripts/launch_multi_node.sh vgg fsdp_stage3 4 8 8 100 --offload all
make trian
python scripts/doctor.py --check DIR
find . | python scripts/predict.py digits - --format xml
zerovision launch basic_cnn ddp 2 16 one
zerovision evaluat digits
zerovison predict digits
```
```json
{"zero_optimisation": {}}
```
```yaml
epoch: 3
```
```python
import zerovision
from zerovision.training.checkpoint.weights import load_weights
zerovision.predict_all
```
""",
        encoding="utf-8",
    )
    found = problems(page, tmp_path)
    expected = ["link to missing.md", "link to #no-heading", "path zerovision/missing.py", "flag --batchsize"]
    expected += ["launch_distributed.sh mobilnet", "--epochs 0", "trian", "doctor.py --check DIR", "--format 'xml'"]
    expected += ["--epochs 'one'", "no verb evaluat", "unknown program zerovison"]
    expected += ["'zero_optimisation'", "'epoch'", "import of load_weights", "import of predict_all"]
    assert len(found) == len(expected), found
    for problem, part in zip(found, expected, strict=True):
        assert part in problem
