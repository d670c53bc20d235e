"""Counts the product files that name a way of training outside its own folder: part of `make lint`.

A limit is what there was last; whoever fences a way lowers it in the same commit, and nobody raises one. The end is 4
files each, its table among them, 8 for DeepSpeed. Functions with more than six parameters are counted as well, and
dataclasses and named tuples with more than fifteen fields, except settings.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINES, TASKS = "zerovision/training/engines", "zerovision/training/tasks"
FENCES = {  # what names it, its own files, limit
    "deepspeed": (r"(?i)deepspeed", rf"{ENGINES}/deepspeed/", 8),
    # The exceptions are a key of the hub's model cards, and two of DeepSpeed's configuration.
    "pipeline": (r"(?i)pipelin(?!e_tag|e_read|e_write)|has_stages", rf"{ENGINES}/pipeline/", 4),
    "several labels": (
        r"(?i)multi[-_]?label|label_?sets|label_?lists|several_?labels",
        rf"{TASKS}/multilabel/",
        3,  # the table of tasks, the flags of data, and what reads lists in tables
    ),
    "tensor": (r"tensor_parallel|TensorPart|engines\.tensor\b|world\.tensor", rf"{ENGINES}/tensor/", 1),
    # The contrast of an image, beside its brightness, is another thing.
    "contrastive": (r"(?i)(?<!brightness, )contrast|supcon|gradient_?cache", rf"{TASKS}/contrast/", 2),
    "islands": (r"(?i)island|diloco|local.?steps?\b|outer_", rf"{ENGINES}/islands/", 3),
    "teacher": (r"(?i)teacher|distill", rf"{TASKS}/teacher/", 1),
}
MOST_PARAMETERS, MOST_FIELDS = 6, 15


def product_files() -> dict[str, str]:
    """Return the text of every Python file of the product, by path."""
    listing = subprocess.run(
        ["git", "ls-files", "zerovision/*.py", "models/*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name: (ROOT / name).read_text() for name in listing.stdout.splitlines() if (ROOT / name).is_file()}


def many_parameters(text: str) -> int:
    """Return how many functions of a file have more than six parameters, beside self."""
    found = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found += sum(one.arg not in ("self", "cls") for one in arguments) > MOST_PARAMETERS
    return found


def many_fields(path: str, text: str) -> int:
    """Return how many classes of a file have more than fifteen annotated fields; settings may have any number."""
    if path.endswith("settings.py"):
        return 0
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    return sum(sum(isinstance(line, ast.AnnAssign) for line in one.body) > MOST_FIELDS for one in classes)


def main() -> int:
    """Print a line per way of training; return 1 if one is named in more files than its limit."""
    texts = product_files()
    counts = {
        name: (
            sum(not re.match(own, path) and bool(re.search(word, path + text)) for path, text in texts.items()),
            limit,
        )
        for name, (word, own, limit) in FENCES.items()
    }
    counts["functions of many parameters"] = sum(map(many_parameters, texts.values())), 0
    counts["classes of many fields"] = sum(many_fields(*file) for file in texts.items()), 0
    for name, (count, limit) in counts.items():
        print(f"{name:30}  {count:3}  limit {limit:3}{'  too many' if count > limit else ''}")
    return int(any(count > limit for count, limit in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
