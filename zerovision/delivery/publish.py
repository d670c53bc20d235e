"""Publishes a model on the Hugging Face hub: weights, class names, a config.json for timm, and the model card.

The format is documented at https://huggingface.co/docs/hub/model-cards. huggingface_hub generates the front matter, and
model_card.md.j2 is the template of the text.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import jinja2
import timm
import torch
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from timm.models._hub import save_config_for_hf

from zerovision.delivery.calibration import calibration_file, read_calibration
from zerovision.delivery.export.output_folder import DIVISORS
from zerovision.delivery.intervals import interval_of
from zerovision.delivery.report.run_files import count_global_batch, read_run
from zerovision.delivery.settings import PublishSettings
from zerovision.delivery.trained_model import find_model, read_run_config
from zerovision.models import sides
from zerovision.models.timm_models import timm_size
from zerovision.models.weights_metadata import Description, Preprocessing
from zerovision.training.base.errors import UserError, one_line, shown
from zerovision.training.base.files import replacing
from zerovision.training.base.points import SCORE_NAMES, has_top5
from zerovision.training.base.run_folder import CARD, WEIGHTS, shown_path
from zerovision.training.base.units import format_bytes, percent
from zerovision.training.checkpoint.weights import CLASS_MAP, class_map, read_metadata
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
NOT_RECIPE = {
    *WORDS_OF_LAUNCH,
    *OF_ONE_RUN,
    *("precision", "data", "data_root", "download", "decode", "cache", "cache_gb", "remote_cache_gb"),
    *("workers", "bad_images"),
}
TIMM_CONFIG = "config.json"


def write_model_card(run: Path) -> Path | None:
    """Write README.md into the folder of a finished run, and return its path.

    Return None if the folder contains a README.md without `MARK` or lacks what environment.json says, or if the model
    does not have a classifier yet.
    """
    card = run / CARD
    if card.exists() and MARK not in card.read_text(encoding="utf-8"):
        return None
    config, metadata = without_folders(as_given(read_run_config(run))), read_metadata(run / WEIGHTS)
    description: Description = metadata["description"]
    files, preprocessing = read_run(run), metadata["preprocessing"]
    if description.embedding or "ranks" not in files.environment:
        return None
    environment, epochs = files.environment, [line for _, line in sorted(files.history.epochs.items())]
    ranks, per_machine = environment["ranks"], environment.get("ranks_per_machine", environment["ranks"])
    jinja = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    jinja.filters |= {"plain": _plain, "code": _code, "interval": _interval, "has_top5": has_top5}
    jinja.filters |= {"name": name_alone, "percent": percent}
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
        values = {"top-1": ("accuracy", scores["top1"]), "macro F1": ("f1", scores["macro"]["f1"])}
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


def run(settings: PublishSettings) -> int:
    """Run the command and return its exit code."""
    for line in publish(settings):
        print(line)
    return 0


def publish(settings: PublishSettings) -> Iterator[str]:
    """Upload a model to the hub in one commit, and yield the lines to print, or raise a UserError.

    The hub's client reads the token from HF_TOKEN, or from the file in which `hf auth login` stored the token.
    """
    repository, dry_run = settings.repository, settings.dry_run
    check_repository(repository)
    weights = find_model(settings.model).weights
    card, metadata = weights.with_name(CARD), read_metadata(weights)
    if not card.is_file():
        raise UserError(f"'{weights.parent}' has no {CARD}, the model card, which a run writes when it finishes.")
    files: dict[str, Path | bytes] = {WEIGHTS: weights, CARD: card}
    if (names := class_map(metadata["class_names"])) is not None:
        files[CLASS_MAP] = names
    if read_calibration(weights) is not None:
        files[calibration_file(Path(WEIGHTS)).name] = calibration_file(weights)
    reason = why_not_for_timm(metadata)
    if not reason:
        files[TIMM_CONFIG] = timm_config(metadata)
    elif metadata["description"].timm_name:
        yield f"note: {TIMM_CONFIG} is left out: {reason}; {shown_path(card)} says how timm loads it"
    if TO_FILL in card.read_text(encoding="utf-8", errors="replace"):
        yield f"note: the license in {shown_path(card)} is still {TO_FILL}"
    for name, file in files.items():
        size = len(file) if isinstance(file, bytes) else file.stat().st_size
        yield f"{'would upload' if dry_run else 'uploads'} {name}, {format_bytes(size)}"
    if dry_run:
        yield f"nothing was uploaded to {repository} (--dry-run)"
        return
    operations = [CommitOperationAdd(name, file) for name, file in files.items()]
    try:
        hub = HfApi()
        hub.create_repo(repository, private=not settings.public, exist_ok=True)
        hub.create_commit(repository, operations, commit_message=f"{weights.parent.name}, trained with zerovision")
    except Exception as error:  # the hub's client raises a dozen types without a common base class
        said = one_line(error).replace(huggingface_hub.get_token() or "\0", "***").rstrip(".")
        raise UserError(
            f"'{repository}' was not published: {type(error).__name__}, {said}. Is the name right, and does the token "
            "(HF_TOKEN, or hf auth login) allow writing there?"
        ) from None
    yield f"published    {huggingface_hub.constants.ENDPOINT}/{repository}"


def check_repository(name: str) -> None:
    """Raise UserError unless the name is a valid ORG/NAME on the hub."""
    try:
        validate_repo_id(name)
        is_right = name.count("/") == 1
    except HFValidationError:
        is_right = False
    if not is_right:
        raise UserError(
            f"{shown(name)} is not a valid name on the hub: use ORG/NAME with letters, digits, '-', '_' and '.', such "
            "as my-team/photos."
        )


def why_not_for_timm(metadata: dict[str, Any]) -> str:
    """Return why `timm.create_model("hf-hub:ORG/NAME")` cannot load this network correctly, or '' if it can."""
    description = metadata["description"]
    if not description.timm_name:
        return "it is not a timm network"
    if description.stem_stride_changed:
        return "timm would use the usual stride in its first layer"
    if metadata["preprocessing"].values != BYTES:
        return "timm's images are bytes"
    if _kept_share(metadata["preprocessing"]) is None:
        return "timm cuts off the same share of height and width"
    return ""


def timm_config(metadata: dict[str, Any]) -> bytes:
    """Return config.json as timm writes it: the network, its classes, and the preprocessing."""
    description, preprocessing = metadata["description"], metadata["preprocessing"]
    height, width = preprocessing.sides
    options: dict[str, Any] = {"in_chans": preprocessing.channels}
    if (size := timm_size(description.timm_name, preprocessing.image_size)) is not None:
        options["img_size"] = size
    with torch.device("meta"):
        network = timm.create_model(description.timm_name, num_classes=description.num_classes, **options)
    cut = "squash" if preprocessing.resize_size is None else "center"
    prepared = {name: getattr(preprocessing, name) for name in ("mean", "std", "interpolation")}
    prepared |= {
        "input_size": (options["in_chans"], height, width),
        "crop_pct": _kept_share(preprocessing),
        "crop_mode": "border" if preprocessing.fit == "pad" else cut,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / TIMM_CONFIG
        labels = {"label_names": metadata["class_names"]}
        save_config_for_hf(network, str(path), model_config=labels, data_config=prepared)
        return json.dumps(json.loads(path.read_bytes()), indent=2).encode()


def _kept_share(preprocessing: Preprocessing) -> float | None:
    """Return the `crop_pct` from which timm computes the size to resize images to; None if no value works."""
    if preprocessing.resize_size is None:
        return 1.0
    kept, resized = preprocessing.sides, sides(preprocessing.resize_size)
    share = min(part / whole for part, whole in zip(kept, resized, strict=True))
    near = (share, math.nextafter(share, 0))
    return next((one for one in near if tuple(math.floor(side / one) for side in kept) == resized), None)
