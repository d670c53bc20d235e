"""The images that a trained model is evaluated on, prepared as in its training, with the model's own labels."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from training.config import TrainConfig
from training.data import DATASETS, DataOptions, find_dataset, load_data
from training.data.datasets import DatasetPair, ImageDataset
from training.data.folder import has_parts, load_whole
from training.data.values import values_of
from training.errors import UserError, unknown_name

SPLITS = ("auto", "val", "train", "all")
NAMES_IN_MESSAGE = 5


@dataclass(frozen=True)
class EvaluationData:
    """What a model is evaluated on.

    Attributes:
        datasets: the images to evaluate are its `val`.
        data: what was asked for, such as "digits", or the full path of a folder; of the run's own what it was given.
        split: "val", "train" or "all".
        label_map: int64 [classes of the data], the model's number of each class.
        is_own: whether the run was trained on it.
    """

    datasets: DatasetPair
    data: str
    split: str
    label_map: torch.Tensor
    is_own: bool


@dataclass(frozen=True)
class EvaluationChoice:
    """The images that a user chooses; empty values mean those of the run.

    Attributes:
        data: a name of `DATASETS` or a folder.
        split: a name of `SPLITS`.
        data_root: as `DataOptions.data_root`.
        bad_images: as `DataOptions.bad_images`.
        allow_missing_classes: whether the data may lack classes that the model knows.
    """

    data: str = ""
    split: str = "auto"
    data_root: str = ""
    bad_images: str = ""
    allow_missing_classes: bool = False


def load_evaluation_data(
    metadata: dict[str, Any], config: TrainConfig | None, choice: EvaluationChoice, fingerprint: str
) -> EvaluationData:
    """Load the images that the user, or else the run, names.

    Args:
        metadata: what `training.checkpoint.weights.load_model` returned.
        config: the run's configuration, None if it is not known.
        choice: what the user asks for.
        fingerprint: of the run's data, '' if it is not known.

    Raises:
        UserError: if there is no such data, its classes are not the model's, or the run's path leads elsewhere now.
    """
    if choice.split not in SPLITS:
        raise unknown_name("split", choice.split, SPLITS)
    if not choice.data and config is None:
        raise UserError("these weights lie outside a run, so their data is not known: give --data.")
    trained_on = config.data if config else ""
    data = choice.data or trained_on
    options = _data_options(metadata["preprocessing"], config or TrainConfig(), choice, data)
    divided = cache(lambda: load_data(options))  # once, also where its files tell whether it is the run's
    is_own = _is_own(data, trained_on, fingerprint, divided)
    if not choice.data and not is_own:
        raise UserError(f"'{data}', which the run was trained on, is not here: give --data, with its full path.")
    split = _resolve_split(choice.split, data, is_own=is_own)
    datasets = load_whole(options) if split == "all" else divided()
    name = trained_on if is_own else str(Path(os.path.expanduser(data)).resolve()) if _is_folder(data) else data
    wanted, found = (values_of(each) for each in (metadata["preprocessing"], datasets.preprocessing))
    if wanted != found:
        raise UserError(f"the model was trained on {wanted} values, '{data}' has {found}: convert it.")
    part = datasets.train if split == "train" else datasets.val
    seen_as = ImageDataset(part.source, metadata["preprocessing"], most_bad=part.most_bad)
    label_map = _label_map(datasets.class_names, metadata["class_names"], choice.allow_missing_classes)
    return EvaluationData(dataclasses.replace(datasets, val=seen_as), name, split, label_map, is_own)


def _is_folder(data: str) -> bool:
    return find_dataset(data) is DATASETS["folder"]


def _is_own(data: str, trained_on: str, fingerprint: str, divided: Callable[[], DatasetPair]) -> bool:
    """Return whether data is the run's, by its name; a folder by its path, or by its files if that is relative."""
    if not trained_on or not _is_folder(data):
        return data == trained_on
    path, own = (Path(os.path.expanduser(name)) for name in (data, trained_on))
    if path.resolve() == own.resolve() and (own.is_absolute() or not fingerprint):
        return True
    try:
        return fingerprint != "" and divided().fingerprint == fingerprint
    except UserError:  # it cannot be divided as the run's is
        return False


def _resolve_split(split: str, data: str, *, is_own: bool) -> str:
    """Return what "auto" means: all images of a folder that was not trained on and has no val/, else what was held out.

    Raises:
        UserError: if the data has no such part.
    """
    is_undivided = _is_folder(data) and not has_parts(data)
    if split == "all" and not is_undivided:
        raise UserError(f"--split all is for one folder of classes; '{data}' has parts: give val or train.")
    if split != "auto":
        return split
    return "all" if is_undivided and not is_own else "val"


def _data_options(
    preprocessing: dict[str, Any], config: TrainConfig, choice: EvaluationChoice, data: str
) -> DataOptions:
    return DataOptions(
        data=data,
        val_fraction=config.val_fraction,
        image_size=preprocessing["image_size"],
        image_channels=len(preprocessing["mean"]),
        augmentation="none",
        bad_images=choice.bad_images or config.bad_images,
        seed=config.seed,
        interpolation=preprocessing["interpolation"],
        data_root=choice.data_root or config.data_root,
        mean=tuple(preprocessing["mean"]),
        std=tuple(preprocessing["std"]),
        decode="cpu" if config.decode == "gpu" and not torch.cuda.is_available() else config.decode,
    )


def _label_map(data_classes: list[str], model_classes: list[str], allow_missing: bool) -> torch.Tensor:
    """Return the model's number of each class of the data.

    Raises:
        UserError: if the data has a class that the model does not know, or lacks one (unless allowed).
    """
    unknown = [name for name in data_classes if name not in set(model_classes)]
    missing = [name for name in model_classes if name not in set(data_classes)]
    if unknown:
        raise UserError(
            f"the data has {len(unknown)} class(es) that the model does not know: {_shown(unknown)}. "
            f"The model knows {len(model_classes)}: {_shown(model_classes)}."
        )
    if missing and not allow_missing:
        raise UserError(
            f"the data lacks {len(missing)} of the model's {len(model_classes)} classes: {_shown(missing)}. "
            "Add them, or give --allow-missing-classes."
        )
    number_of = {name: number for number, name in enumerate(model_classes)}
    return torch.tensor([number_of[name] for name in data_classes])


def _shown(names: list[str]) -> str:
    more = ", ..." if len(names) > NAMES_IN_MESSAGE else ""
    return ", ".join(repr(name) for name in names[:NAMES_IN_MESSAGE]) + more
