"""Publishes a model on the Hugging Face hub: weights, model card, class names, and a config.json for timm."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import timm
import torch
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from timm.models._hub import save_config_for_hf

from zerovision.delivery.calibration import calibration_file, read_calibration
from zerovision.delivery.model_card import TO_FILL
from zerovision.delivery.settings import PublishSettings
from zerovision.delivery.trained_model import find_model
from zerovision.models.sides import sides
from zerovision.models.timm_models import timm_size
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.errors import UserError, one_line, shown
from zerovision.training.base.run_folder import CARD, WEIGHTS, shown_path
from zerovision.training.base.units import format_bytes
from zerovision.training.checkpoint.weights import CLASS_MAP, class_map, read_metadata
from zerovision.training.data.reading.image_numbers import BYTES

TIMM_CONFIG = "config.json"


def run(settings: PublishSettings) -> int:
    """Run the command and return its exit code."""
    for line in publish(settings):
        print(line)
    return 0


def publish(settings: PublishSettings) -> Iterator[str]:
    """Upload a model to the hub in one commit, and yield the lines to print.

    The hub's client reads the token from HF_TOKEN, or from the file in which `hf auth login` stored the token.

    Raises:
        UserError: if the repository's name is invalid, the run has no model card, or the upload fails.
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
