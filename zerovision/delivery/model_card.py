"""Writes the model card: README.md in a run's folder, with the front matter that the Hugging Face hub reads.

The format is documented at https://huggingface.co/docs/hub/model-cards. huggingface_hub generates the front matter, and
model_card.md.j2 is the template of the text.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from zerovision.delivery.export.output_folder import DIVISORS
from zerovision.delivery.intervals import interval_of
from zerovision.delivery.report.run_files import count_global_batch, read_run
from zerovision.delivery.trained_model import read_run_config
from zerovision.models.timm_models import timm_size
from zerovision.models.weights_metadata import Description
from zerovision.training.base.files import replacing
from zerovision.training.base.points import SCORE_NAMES, has_top5
from zerovision.training.base.run_folder import CARD, WEIGHTS
from zerovision.training.base.units import percent
from zerovision.training.checkpoint.weights import read_metadata
from zerovision.training.config import TrainConfig
from zerovision.training.config.values import (
    OF_ONE_RUN,
    WORDS_OF_LAUNCH,
    as_given,
    launch_command,
    name_alone,
    show_value,
    without_folders,
)
from zerovision.training.data.reading.image_numbers import BYTES
from zerovision.training.data.settings import DataSettings
from zerovision.training.recipe.settings import RecipeSettings
from zerovision.training.tasks.labels import task_of
from zerovision.training.tasks.settings import TaskSettings

TEMPLATE = Path(__file__).with_name("model_card.md.j2")
MARK = (
    "<!-- Written by zerovision at the end of the run; delete this line, and no later run overwrites your changes. -->"
)
TO_FILL = "to-be-filled-in"
CLASSES_SHOWN = 50
ALWAYS_SHOWN = (
    *("epochs", "batch_size", "gradient_accumulation_steps", "optimizer", "learning_rate", "base_batch_size"),
    *("schedule", "warmup_epochs", "final_learning_rate_scale", "weight_decay", "gradient_clipping"),
    *("loss", "label_smoothing", "tune"),
    *("class_weights", "sampling", "repeated_augmentation", "augmentation", "pretrained", "weights", "seed"),
)

# Settings that are not part of the recipe: how a run is launched, where images come from, and how images are read.
NOT_RECIPE = frozenset(
    {
        *WORDS_OF_LAUNCH,
        *OF_ONE_RUN,
        *("precision", "data", "data_root", "download", "decode", "cache", "cache_gb", "remote_cache_gb"),
        *("workers", "bad_images"),
    }
)


def write_model_card(run: Path) -> Path | None:
    """Write README.md into the folder of a finished run, unless the folder contains a README.md without `MARK`.

    Args:
        run: the run's folder, with config.json, environment.json, metrics.jsonl, model.safetensors and the evaluation.

    Returns:
        Path of the card; None if a README.md of the user was kept, or if the model does not have a classifier yet.
    """
    card = run / CARD
    if card.exists() and MARK not in card.read_text(encoding="utf-8"):
        return None
    config, metadata = without_folders(as_given(read_run_config(run))), read_metadata(run / WEIGHTS)
    description: Description = metadata["description"]
    if description.embedding:
        return None
    files, preprocessing = read_run(run), metadata["preprocessing"]
    environment, epochs = files.environment, [line for _, line in sorted(files.history.epochs.items())]
    ranks, per_machine = environment["ranks"], environment.get("ranks_per_machine", environment["ranks"])
    jinja = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    jinja.filters |= {
        "plain": _plain,
        "code": _code,
        "interval": _interval,
        "has_top5": has_top5,
        "name": name_alone,
        "percent": percent,
    }
    text = jinja.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=run.name,
        mark=MARK,
        front_matter=_front_matter(run.name, config, description, [files.scores, files.test_scores]),
        config=config,
        chosen_for=SCORE_NAMES[config.best_by],
        run=files,
        thresholds=task_of(metadata).thresholds,
        metadata=metadata,
        classes_shown=CLASSES_SHOWN,
        preprocessing=json.dumps(preprocessing.to_dict()),
        image="image.npy" if preprocessing.takes_numbers else "photo.jpg",
        divisor=0 if preprocessing.values == BYTES else DIVISORS[preprocessing.values],
        fixed_size=timm_size(description.timm_name, description.image_size),
        weights=WEIGHTS,
        last_epoch=epochs[-1] if epochs else {},
        other_run=([{}] + [line for line in epochs if line.get("epochs", config.epochs) != config.epochs])[-1],
        global_batch=count_global_batch(vars(config), environment),
        recipe={name: show_value(value) for name in recipe_names(config) if (value := getattr(config, name)) != ""},
        command=shlex.join(launch_command(config, ranks, per_machine, OF_ONE_RUN)),
    )
    with replacing(card) as temporary:
        temporary.write_bytes(text.encode("utf-8", "surrogateescape"))  # folder names may contain invalid UTF-8
    return card


def recipe_names(config: TrainConfig) -> list[str]:
    """Return the names of the settings in the card's recipe: `ALWAYS_SHOWN`, and settings with non-default values."""
    fields = {
        field.name: field for kind in (TaskSettings, RecipeSettings, DataSettings) for field in dataclasses.fields(kind)
    }
    chosen = [name for name, field in fields.items() if getattr(config, name) != field.default]
    return [*ALWAYS_SHOWN, *(name for name in chosen if name not in NOT_RECIPE.union(ALWAYS_SHOWN))]


def _front_matter(
    name: str, config: TrainConfig, description: Description, all_scores: Sequence[Mapping[str, Any] | None]
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    results = []
    for scores in filter(None, all_scores):
        values = {
            "top-1": ("accuracy", scores["top1"]),
            "macro F1": ("f1", scores["macro"]["f1"]),
        }
        if has_top5(scores):
            values["top-5"] = ("accuracy", scores["top5"])
        if "map" in scores:
            values["mAP"] = ("mean_average_precision", scores["map"])
        of: dict[str, Any] = {"dataset_type": Path(config.data).name, "dataset_name": Path(config.data).name}
        of |= {"task_type": "image-classification", "dataset_split": scores["split"]}
        results += [
            EvalResult(**of, metric_type=kind, metric_name=name, metric_value=value)
            for name, (kind, value) in values.items()
        ]
    data = ModelCardData(
        license="other",
        license_name=TO_FILL,
        license_link=TO_FILL,
        library_name="timm" if description.timm_name else "pytorch",
        pipeline_tag="image-classification",
        tags=["image-classification", "zerovision", description.model_type],
        model_name=name if results else None,
        eval_results=results or None,
    )
    return data.to_yaml()


def _interval(scores: Mapping[str, Any], name: str) -> str:
    """Return the interval of a score in brackets, with a leading space, or '' if the score has no interval."""
    found = interval_of(scores, name)
    if found is None:
        return ""
    unit, digits = (1, 4) if name == "loss" else (100, 2)
    return f" [{unit * found[0]:.{digits}f}, {unit * found[1]:.{digits}f}]"


def _plain(text: str) -> str:
    """Return text on one line, escaped so that Markdown shows it unchanged."""
    for sign in "\\`|<>*_[]":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def _code(text: str) -> str:
    """Return text as inline code; backticks become apostrophes, because Markdown cannot escape them in code."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"
