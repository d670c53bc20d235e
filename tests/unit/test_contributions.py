"""What a new model, strategy, data set, augmentation, schedule, format, preset or flag has to be named in.

All that is missing is told at once, each with its place: CONTRIBUTING.md has the same list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from zerovision.delivery.export import FORMATS
from zerovision.models import MODELS
from zerovision.training.base.settings import PRESETS
from zerovision.training.checkpoint.settings import CheckpointSettings
from zerovision.training.config import CHANGEABLE_ON_RESUME, FLAG_OF
from zerovision.training.data import DATASETS
from zerovision.training.data.augmentations import AUGMENTATIONS
from zerovision.training.engines.deepspeed.config import strategy_file
from zerovision.training.engines.strategies import STRATEGIES
from zerovision.training.observe.settings import ObserveSettings
from zerovision.training.recipe.schedule import SCHEDULES

ROOT = Path(__file__).resolve().parents[2]


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def places() -> Iterator[tuple[str, list[str], str]]:
    """Yield kinds of entries, their names, and a page that names each as code."""
    yield "model", [*MODELS], "docs/models.md"
    yield "model", [*MODELS], "docs/guide.md"
    yield "strategy", [*STRATEGIES], "README.md"
    yield "strategy", [*STRATEGIES], "docs/guide.md"
    yield "strategy", [*STRATEGIES, *(strategy_file(name).name for name in STRATEGIES)], "docs/strategies.md"
    yield "data set", [entry.usage for entry in DATASETS.values()], "docs/data.md"
    yield "augmentation", ["auto", *AUGMENTATIONS], "docs/data.md"
    yield "schedule", [*SCHEDULES], "docs/guide.md"
    yield "export format", [*FORMATS], "docs/export.md"
    yield "preset", [*PRESETS], "docs/recipes.md"
    yield "flag", [*FLAG_OF.values()], "docs/guide.md"


def missing() -> list[str]:
    """Return a line for every name that is lacking somewhere."""
    found = []
    for kind, names, page in places():
        code = {word for span in re.findall(r"`([^`\n]+)`", text_of(page)) for word in span.split()}
        found += [f"{kind} {name}: `{name}` in {page}" for name in names if name not in code]
    found += [
        f"strategy {name}: the file deepspeed_configs/{strategy_file(name).name}"
        for name in STRATEGIES
        if not strategy_file(name).is_file()
    ]
    rows = text_of("docs/models.md").partition("\n## ")[0]
    found += [f"model {name}: a row with its size in docs/models.md" for name in MODELS if f"`{name}`" not in rows]
    known = text_of("tests/references/flags.txt")
    update = ".venv/bin/python -m tests.unit.test_flags > tests/references/flags.txt"
    found += [f"flag {flag}: {update}" for flag in FLAG_OF.values() if f"train_distributed {flag}:" not in known]
    of_output = {*vars(ObserveSettings)["__annotations__"], *vars(CheckpointSettings)["__annotations__"]}
    found += [
        f"flag {FLAG_OF[name]}: in CHANGEABLE_ON_RESUME, zerovision/training/config/__init__.py, "
        "as all of output and checkpoints"
        for name in of_output - CHANGEABLE_ON_RESUME
    ]
    return found


def test_everything_new_is_named_everywhere() -> None:
    assert missing() == []
