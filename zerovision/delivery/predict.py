"""Predicts the classes of images: files of any size, whole folders, or standard input."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import nn

from zerovision.delivery.activation_map import activation_maps, picture_of
from zerovision.delivery.calibration import NONE_OF_THESE, Calibration, calibration_file, read_calibration
from zerovision.delivery.flags import predict_parser
from zerovision.delivery.trained_model import find_model
from zerovision.delivery.views import Views, checked_views, probabilities_of
from zerovision.training.base.control_groups import limit_threads, usable_cores
from zerovision.training.base.errors import UserError
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.config import TrainConfig
from zerovision.training.data.folder_listing import SYSTEM_NAMES
from zerovision.training.data.label_sets import SEPARATOR
from zerovision.training.data.reading.formats import ARRAY_EXTENSION, IMAGE_EXTENSIONS
from zerovision.training.data.reading.image_notes import collected_notes
from zerovision.training.data.reading.images import MAX_FILE_BYTES, ImageError
from zerovision.training.data.reading.model_input import ModelInput
from zerovision.training.data.reading.retry import entries_of, is_folder, patiently
from zerovision.training.data.settings import MAX_MEGAPIXELS, NUMBERS
from zerovision.training.observe.multilabel import thresholds_of
from zerovision.training.world.preserved_process import preserved_torch_settings
from zerovision.training.world.world import use_exact_fp32

STDIN = "-"
STDIN_NAME = "standard input"

_SETTINGS = threading.Lock()  # PyTorch's, which threads that predict at the same time would save of each other

# The path of an image, and its content if that came over standard input.
Entry = tuple[str, bytes | None]


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image.

    Attributes:
        image: the path as it was given.
        labels: names of classes, the most probable one first; empty for an image that cannot be read.
        probabilities: theirs, in 0..1; calibrated, if the model is.
        note: what is odd about the image, in one line; usually empty.
        error: why the image cannot be read, in one line; empty if it can.
        picture: the image as the network saw it, darker where it spoke less for the first label; if asked for.
        is_rejected: whether the highest probability is below the model's threshold; None if it has none.
        chosen: all classes above their thresholds, of a model of several labels.
    """

    image: str
    labels: list[str]
    probabilities: list[float]
    note: str = ""
    error: str = ""
    picture: Image.Image | None = None
    is_rejected: bool | None = None
    chosen: list[str] | None = None

    @property
    def label(self) -> str:
        """The most probable class, or that it is none of them; of several labels all, with semicolons between."""
        if self.chosen is not None:
            return SEPARATOR.join(self.chosen)
        return NONE_OF_THESE if self.is_rejected else self.labels[0]


@dataclass(frozen=True)
class Predictor:
    """A loaded model with what it is asked for: from images to their predictions.

    Attributes:
        module: the network, on its device, in evaluation mode.
        metadata: of its weights.
        top_k: classes of each prediction.
        views: of each image, whose probabilities are averaged.
        batch_size: images of one forward pass.
        reader: of the images.
        explain: whether predictions have a picture.
        calibration: what turns logits into probabilities, and rejects images; None for softmax alone.
    """

    module: nn.Module
    metadata: dict[str, Any]
    top_k: int
    views: Views
    batch_size: int
    reader: ModelInput
    explain: bool
    calibration: Calibration | None = None

    @property
    def is_of_arrays(self) -> bool:
        """Whether the network takes numbers that no picture has."""
        return self.metadata["preprocessing"].takes_numbers


def predict(
    model: str | Path,
    images: str | Path | Iterable[str | Path],
    *,
    top_k: int = 3,
    flip: bool = False,
    shift_pixels: int = 0,
    batch_size: int = 64,
    device: str = "",
    decode: str = "",
    max_megapixels: int = 0,
    explain: bool = False,
) -> Iterator[Prediction]:
    """Load a trained model, and return an iterator over the predictions of all images, in order.

    Args:
        model: a run's name or folder, or a safetensors file.
        images: one or several files, folders (searched to any depth, in order of their names; hidden files and those of
            systems are left out), or "-" for standard input: one image, or paths, one a line. A .npy file contains one
            image, [H, W] or [H, W, C].
        top_k: how many classes each prediction names, at most as many as there are.
        flip: whether to predict the mirrored image too, and to average both probabilities.
        shift_pixels: how far to shift each image for two more views of it, averaged with it.
        batch_size: images of one forward pass.
        device: "cpu" or "cuda"; default: a GPU if there is one.
        decode: "cpu" or "exact", as in training; default: as the run, "cpu" if it is not known.
        max_megapixels: of the largest image file, as in training; 0: as the run.
        explain: whether each prediction has a picture of what spoke for its first label.

    Raises:
        UserError: for a mistake in the arguments, and weights that cannot be used. While iterating: a folder contains
            no image, or standard input is empty or has more than `MAX_FILE_BYTES`.
    """
    predictor = load_predictor(
        model,
        top_k=top_k,
        flip=flip,
        shift_pixels=shift_pixels,
        batch_size=batch_size,
        device=device,
        decode=decode,
        max_megapixels=max_megapixels,
        explain=explain,
    )
    extensions = (
        (*IMAGE_EXTENSIONS, ARRAY_EXTENSION)
        if predictor.is_of_arrays or predictor.reader.decode == NUMBERS
        else IMAGE_EXTENSIONS
    )
    return predictions_of(predictor, _list_images(images, extensions))


def load_predictor(
    model: str | Path,
    *,
    top_k: int = 3,
    flip: bool = False,
    shift_pixels: int = 0,
    batch_size: int = 64,
    device: str = "",
    decode: str = "",
    max_megapixels: int = 0,
    explain: bool = False,
) -> Predictor:
    """Load a trained model; arguments and errors are those of `predict`."""
    parser = predict_parser(None)
    parser.check(top_k=top_k, shift_pixels=shift_pixels, batch_size=batch_size)
    parser.check(device=device or "cpu", decode=decode or "cpu", max_megapixels=max_megapixels or MAX_MEGAPIXELS)
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise UserError("--device cuda: PyTorch finds no GPU here; leave it out, or give --device cpu.")
    trained = find_model(model)
    run = trained.config() or TrainConfig()
    module, metadata = load_model(trained.weights)
    decode = decode or metadata["preprocessing"].decode or run.decode
    reader = ModelInput(metadata["preprocessing"], decode, (max_megapixels or run.max_megapixels) * 10**6)
    module.to(device or ("cuda" if has_gpu else "cpu"))
    views = checked_views(flip, shift_pixels, metadata)
    calibration = read_calibration(trained.weights)
    if calibration is None and calibration_file(trained.weights).exists():
        print(
            f"note: '{calibration_file(trained.weights)}' is of other weights than these and not used: calibrate them "
            "with scripts/evaluate.py --reject",
            file=sys.stderr,
        )
    calibrated = views if calibration is None else Views(calibration.flip, calibration.shift_pixels)
    if calibrated != views:
        raise UserError(
            f"the model is calibrated for {calibrated}, not for {views}: give the same, or calibrate it so with "
            "scripts/evaluate.py --reject."
        )
    predictor = Predictor(module, metadata, top_k, views, batch_size, reader, explain, calibration)
    if explain and predictor.is_of_arrays:
        raise UserError("--explain: the model was trained on arrays, which have no picture: leave it out.")
    return predictor


def predictions_of(predictor: Predictor, entries: Iterator[Entry]) -> Iterator[Prediction]:
    """Yield the prediction of each entry, in order; entries are read `batch_size` at a time."""
    class_names = predictor.metadata["class_names"]

    def read(entry: Entry) -> tuple[torch.Tensor, str] | ImageError:
        try:
            with collected_notes() as notes:
                image = predictor.reader.read(*entry)
        except ImageError as error:
            return error
        return image, notes.get(entry[0], "")

    with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
        while batch := list(islice(entries, predictor.batch_size)):
            images = list(pool.map(read, batch))
            readable = [image[0] for image in images if not isinstance(image, ImageError)]
            best = iter(_top_classes(predictor, torch.stack(readable)) if readable else [])
            several = thresholds_of(predictor.metadata)
            for (path, _), image in zip(batch, images, strict=True):
                if isinstance(image, ImageError):
                    yield Prediction(path, [], [], error=image.reason)
                else:
                    probabilities, classes, picture, every = next(best)
                    labels = [class_names[number] for number in classes]
                    known = predictor.calibration
                    is_rejected, chosen = None if known is None else probabilities[0] < known.threshold, None
                    if several is not None:
                        chosen = [class_names[number] for number in np.flatnonzero(every >= several)]
                        is_rejected = not chosen
                    found = (labels, probabilities, image[1], "", picture, is_rejected, chosen)
                    yield Prediction(path, *found)


@torch.no_grad()
def _top_classes(
    predictor: Predictor, images: torch.Tensor
) -> list[tuple[list[float], list[int], Image.Image | None, np.ndarray]]:
    """Return the highest probabilities of each image, the numbers of their classes, the picture, and all of them."""
    module = predictor.module
    images = images.to(next(module.parameters()).device)
    pictures: list[Image.Image | None] = [None] * len(images)
    with _SETTINGS, preserved_torch_settings():
        limit_threads()
        use_exact_fp32()
        is_multilabel = thresholds_of(predictor.metadata) is not None
        asked = (predictor.views, predictor.calibration)
        probabilities = probabilities_of(module, images, *asked, is_multilabel=is_multilabel)
        best = probabilities.topk(min(predictor.top_k, probabilities.shape[1]), dim=1)
        if predictor.explain:
            maps = activation_maps(module, images, best.indices[:, 0])
            preprocessing = predictor.metadata["preprocessing"]
            pictures = [picture_of(image, one, preprocessing) for image, one in zip(images, maps, strict=True)]
    every = probabilities.cpu().numpy()
    return list(zip(best.values.tolist(), best.indices.tolist(), pictures, every, strict=True))


def _list_images(given: str | Path | Iterable[str | Path], extensions: Sequence[str]) -> Iterator[Entry]:
    for word in map(str, [given] if isinstance(given, str | Path) else given):
        if word == STDIN:
            yield from _from_stdin(sys.stdin.buffer.read(MAX_FILE_BYTES + 1))
        elif is_folder(word):
            yield from ((path, None) for path in _below(word, extensions))
        else:
            yield word, None


def _from_stdin(content: bytes) -> Iterator[Entry]:
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"standard input holds more than {MAX_FILE_BYTES / 1e6:g} MB: '-' reads one image, or paths.")
    try:
        with Image.open(io.BytesIO(content)):
            is_image = True
    except UnidentifiedImageError:
        is_image = False
    except Exception:  # Pillow's readers raise nearly anything on what only begins like an image
        is_image = True
    if is_image:
        yield STDIN_NAME, content
        return
    lines = os.fsdecode(content).split("\n")  # not splitlines, which ends lines at more than that
    paths = [path for line in lines if (path := line.removesuffix("\r"))]
    if not paths:
        raise UserError("standard input is empty: '-' reads one image, or paths, one a line.")
    yield from ((path, None) for path in paths)


def _below(folder: str, extensions: Sequence[str]) -> Iterator[str]:
    """Yield the images below a folder."""
    found = False
    for path in _files_below(folder):
        if Path(path).suffix.lower() in extensions:
            found = True
            yield path
    if not found:
        raise UserError(f"no image in the folder '{folder}': expected files with one of {', '.join(extensions)}.")


def _files_below(folder: str, above: Sequence[str] = ()) -> Iterator[str]:
    """Yield the paths of the files below a folder, its own before those of its subfolders.

    Hidden files and those of systems are left out; links are followed, but not into the folders `above` (real paths).
    """
    try:
        entries = [entry for entry in entries_of(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"the folder {folder!r} cannot be listed: {error.strerror}.") from None
    entries = [entry for entry in entries if entry.name.casefold() not in SYSTEM_NAMES]
    folders = [entry.path for entry in entries if patiently(entry.is_dir, entry.path)]
    yield from (entry.path for entry in entries if entry.path not in folders)
    above = [*above, os.path.realpath(folder)]
    for path in folders:
        if os.path.realpath(path) not in above:
            yield from _files_below(path, above)
