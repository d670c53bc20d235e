"""Loads images to evaluate a trained model on, preprocessed as in training and labeled with the model's classes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerovision.delivery.settings import EvaluateSettings, ExportSettings, ImageSettings
from zerovision.delivery.trained_model import TrainedModel, read_json
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.errors import UserError, either
from zerovision.training.base.run_folder import ENVIRONMENT, IMAGES
from zerovision.training.base.units import plural
from zerovision.training.config import TrainConfig
from zerovision.training.data import DataOptions, find_dataset, list_images, load_data
from zerovision.training.data.class_names import clean
from zerovision.training.data.datasets import DatasetPair, ImageDataset
from zerovision.training.data.division import parts_there
from zerovision.training.data.image_list import ListedImage, TrainedImages, describe_change, read_image_list
from zerovision.training.tasks.labels import OneLabel, task_of

NAMES_IN_MESSAGE = 5
LOOKED_AT_PIXELS = 64  # larger images are decoded at about this size for an audit


@dataclass(frozen=True)
class EvaluationData:
    """The data that a model is evaluated on."""

    datasets: DatasetPair  # `val` contains the images to evaluate
    data: str  # name, such as "digits", or full path of a folder; the run's own data keeps the name given to the run
    split: str  # "val", "test", "train" or "all"
    label_map: torch.Tensor  # int64 [labels of the data], the model's index for each class or set of labels
    task: OneLabel  # scores the predictions
    is_own: bool  # whether the run was trained on this data
    trained_images: TrainedImages | None = None  # the run's, if the data may contain some of them
    notes: tuple[str, ...] = ()  # for the user


class RunData(NamedTuple):
    """What is known about a run's data."""

    fingerprint: str = ""  # see `DatasetPair`; '' if unknown
    folder: str = ""  # full path; '' if the data is not a folder, or if its path is unknown
    images: Sequence[ListedImage] = ()  # listed in the run's folder


def run_data(model: TrainedModel) -> RunData:
    """Return what is known about a model's training data, or raise a UserError if the list of images is damaged."""
    if model.run is None:
        return RunData()
    try:
        environment = read_json(model.run / ENVIRONMENT)
    except UserError:
        environment = {}
    fingerprint, folder = (str(environment.get(key) or "") for key in ("data_fingerprint", "data_folder"))
    return RunData(fingerprint, folder, read_image_list(model.run / IMAGES))


def load_evaluation_data(
    metadata: dict[str, Any], config: TrainConfig | None, choice: EvaluateSettings | ExportSettings, known: RunData
) -> EvaluationData:
    """Load the data that the user chose, or by default the run's own data, for a model with this metadata.

    A UserError is raised if the data does not exist, its classes are not the model's, or the run's path contains other
    data.
    """
    if not choice.data and config is None:
        raise UserError("these weights are not in a run's folder, so the data is not known: add --data.")
    trained_on = config.data if config else ""
    data = choice.data or trained_on
    options = _data_options(metadata["preprocessing"], config or TrainConfig(), choice, data)
    options = dataclasses.replace(options, task=task_of(metadata).name, fewest_classes=1)
    listed = cache(lambda: list_images(options))  # listed only once, even if `_is_own` also needs the list
    divided = cache(lambda: load_data(options, images=listed()))
    is_own = _is_own(data, trained_on, known, divided)
    if not choice.data and not is_own:
        raise UserError(_no_data(data, known, divided))
    if not is_own:  # other data may have parts, which are not divided into folds
        options = dataclasses.replace(options, folds=0)
    images = listed()
    parts = ["train", "val"] if images is None else parts_there(images)
    split = _resolve_split(choice.split, options, parts, is_own=is_own)
    datasets = load_data(options, split, images) if split == "all" or "train" not in parts else divided()
    is_changed = is_own and known.fingerprint not in ("", divided().fingerprint)
    notes = []
    if is_changed:
        notes.append(f"'{data}' has changed since training: {describe_change(known.images, divided())}")
    name = (
        trained_on if is_own else str(Path(os.path.expanduser(data)).resolve()) if find_dataset(data).is_path else data
    )
    wanted, found = (each.values for each in (metadata["preprocessing"], datasets.preprocessing))
    if wanted != found:
        raise UserError(f"the model was trained on {wanted} values, but '{data}' has {found} values: convert them.")
    part = datasets.parts.get(split, datasets.val)
    seen_as = ImageDataset(part.source, metadata["preprocessing"], most_bad=part.most_bad)
    label_map = _label_map(datasets.class_names, metadata["class_names"], choice.allow_missing_classes)
    task, label_map = task_of(metadata).of_data(datasets, label_map)
    may_be_trained_on = known.images and (is_changed or not is_own or split == "train")
    trained = TrainedImages(known.images) if may_be_trained_on else None
    judged = dataclasses.replace(datasets, val=seen_as)
    return EvaluationData(judged, name, split, label_map, task, is_own, trained, tuple(notes))


def _no_data(data: str, known: RunData, divided: Callable[[], DatasetPair]) -> str:
    """Return why the run's data cannot be used: it is missing here, or it differs from the data of the training run."""
    if not os.path.exists(os.path.expanduser(data)):
        return f"'{data}', which the run was trained on, is not here: use --data with its full path."
    place = f"'{known.folder}'" if known.folder else "the folder of that name that the run was trained on"
    difference = describe_change(known.images, divided())
    return f"'{data}' here is not {place}, or has changed ({difference}): use --data with its full path."


def _is_own(data: str, trained_on: str, known: RunData, divided: Callable[[], DatasetPair]) -> bool:
    """Return whether the data is the run's own, judged by its name or, for a folder, by its path or fingerprint."""
    if not trained_on or not find_dataset(data).is_path:
        return data == trained_on
    path, own = (Path(os.path.expanduser(name)) for name in (data, known.folder or trained_on))
    if path.resolve() == own.resolve() and (own.is_absolute() or not known.fingerprint) and path.is_dir():
        return True
    try:
        return known.fingerprint != "" and divided().fingerprint == known.fingerprint
    except UserError:  # the data cannot be divided like the run's data
        return False


def _resolve_split(split: str, options: DataOptions, parts: Sequence[str], *, is_own: bool) -> str:
    """Return the part of the data to evaluate, or raise a UserError if the data does not have the requested part.

    "auto" is the held-out part. For data that is not the run's own, it is all images if the data has no parts, or the
    test part if the data has a test part but no validation part.
    """
    is_undivided = [*parts] == ["train"]
    there = {"val": {"train", "val"}, "train": {"train"}, "test": {"test"}}  # val may be held out from train
    given = either(f"--split {name}" for name, of in there.items() if of & {*parts})
    if split == "all" and not is_undivided:
        raise UserError(f"--split all is for data without parts, but '{options.data}' has parts: use {given}.")
    if not there.get(split, {*parts}) & {*parts}:
        raise UserError(f"--split {split}: '{options.data}' has no {split} part: use {given}.")
    if split != "auto" or is_own or "val" in parts:
        return "val" if split == "auto" else split
    return "all" if is_undivided else "test" if "test" in parts else "val"


def _data_options(preprocessing: Preprocessing, config: TrainConfig, choice: ImageSettings, data: str) -> DataOptions:
    of_split = ("label_separator", "val_fraction", "split_seed", "folds", "fold", "val_part", "seed")
    of_run = (*of_split, "order", "remote_cache_gb")
    of_user = ("path_column", "label_column", "bad_images", "data_root", "max_megapixels")
    filter_name: Any = preprocessing.interpolation  # may be "nearest", which the trainer does not accept
    decode: Any = "numbers" if preprocessing.takes_numbers else preprocessing.decode or config.decode
    return DataOptions(
        **{name: getattr(config, name) for name in of_run},
        **{name: getattr(choice, name) or getattr(config, name) for name in of_user},
        data=data,
        image_size=preprocessing.image_size,
        image_channels=preprocessing.channels,
        augmentation="none",
        interpolation=filter_name,
        mean=preprocessing.mean,
        std=preprocessing.std,
        decode=decode,
    )


def audit_options(config: TrainConfig, choice: ImageSettings, seen_as: Preprocessing | None) -> DataOptions:
    """Return the options for loading all parts of the data, divided as in a run.

    Args:
        config: settings of the run, or the default settings.
        choice: the user's settings that select the data.
        seen_as: preprocessing of the model that will see the data; None without a model.
    """
    plain = Preprocessing(LOOKED_AT_PIXELS, None, mean=(0.0,), std=(1.0,))
    options = dataclasses.replace(_data_options(seen_as or plain, config, choice, choice.data), task=config.task)
    if seen_as is not None:
        return options
    channels = config.image_channels
    decode = config.decode if channels else "numbers"  # images may have any number of channels
    return dataclasses.replace(options, image_channels=channels, decode=decode)


def _label_map(data_classes: list[str], model_classes: list[str], allow_missing: bool) -> torch.Tensor:
    """Return the model's index for each class of the data, int64.

    A UserError is raised if the model lacks a class of the data, or (unless `allow_missing`) the data lacks a class of
    the model.
    """
    keys = {clean(name): number for number, name in enumerate(model_classes)}
    unknown = [name for name in data_classes if name not in keys]
    missing = [model_classes[number] for key, number in keys.items() if key not in data_classes]
    if unknown:
        raise UserError(
            f"the data has {plural(len(unknown), 'class')} unknown to the model: {_shown(unknown)}. The model has "
            f"{plural(len(model_classes), 'class')}: {_shown(model_classes)}."
        )
    if missing and not allow_missing:
        raise UserError(
            f"the data has no images of {len(missing)} of the model's {len(model_classes)} classes: {_shown(missing)}. "
            "Add some, or use --allow-missing-classes."
        )
    return torch.tensor([keys[name] for name in data_classes])


def _shown(names: list[str]) -> str:
    more = ", ..." if len(names) > NAMES_IN_MESSAGE else ""
    return ", ".join(repr(name) for name in names[:NAMES_IN_MESSAGE]) + more
