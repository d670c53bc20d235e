"""Predicts the classes of images (files of any size, whole folders, or standard input) and writes the predictions.

The output is a table, CSV, or one JSON object per line, on standard output or in a file.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from rich.console import Console
from rich.table import Table
from torch import nn

from zerovision.delivery.activation_map import activation_maps, picture_of
from zerovision.delivery.calibration import NONE_OF_THESE, Calibration, Views, calibration_file, read_calibration
from zerovision.delivery.settings import PredictSettings
from zerovision.delivery.trained_model import find_model
from zerovision.delivery.views import checked_views, probabilities_of
from zerovision.training.base.control_groups import limit_threads, usable_cores
from zerovision.training.base.errors import UserError, either, printable
from zerovision.training.base.files import csv_line, errors_of_writing, first_bytes, replacing
from zerovision.training.base.units import plural
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.config import TrainConfig
from zerovision.training.data.class_names import SEPARATOR
from zerovision.training.data.folder import SYSTEM_NAMES
from zerovision.training.data.reading.files import ARRAY_EXTENSION, IMAGE_EXTENSIONS, MAX_FILE_BYTES, ImageError
from zerovision.training.data.reading.image_numbers import ModelInput
from zerovision.training.data.reading.retry import entries_of, is_folder, patiently
from zerovision.training.data.settings import NUMBERS
from zerovision.training.tasks.labels import task_of
from zerovision.training.world.preserved_process import preserved_torch_settings
from zerovision.training.world.world import use_exact_fp32

STDIN = "-"
STDIN_NAME = "standard input"
WIDEST = 10_000  # characters per line of a table in a file
OF_ENDING = {".csv": "csv", ".json": "json", ".jsonl": "json"}
LONGEST_NAME = 100  # bytes of an image's name in the name of its picture

_SETTINGS = threading.Lock()  # guards PyTorch's global settings, which concurrent predictions would otherwise overwrite

# The path of an image, and the image's bytes if they were read from standard input.
Entry = tuple[str, bytes | None]


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image.

    Attributes:
        image: path of the image, as given.
        labels: names of the most probable classes, the most probable first; empty if the image cannot be read.
        probabilities: probabilities of `labels`, in 0..1; calibrated if the model is calibrated.
        note: a remark about the image, on one line; usually empty.
        error: reason why the image cannot be read, on one line; empty if the image can be read.
        picture: the image as the network saw it, darkened where it contributed less to the first label; None if no
            picture was requested.
        is_rejected: whether the highest probability is below the model's threshold; None if the model has no threshold.
        chosen: probabilities of all classes above their thresholds, by class name; None for a model with one label per
            image.
    """

    image: str
    labels: list[str]
    probabilities: list[float]
    note: str = ""
    error: str = ""
    picture: Image.Image | None = None
    is_rejected: bool | None = None
    chosen: dict[str, float] | None = None

    @property
    def label(self) -> str:
        """The most probable class, or "none of these"; several labels are joined by semicolons."""
        if self.chosen is not None:
            return SEPARATOR.join(self.chosen)
        return NONE_OF_THESE if self.is_rejected else self.labels[0]

    @property
    def probability(self) -> float:
        """The highest probability of the classes in `label`, or of all classes if `label` names no class."""
        return max(self.chosen.values()) if self.chosen else self.probabilities[0]


@dataclass(frozen=True)
class Predictor:
    """A loaded model with its settings, which turns images into predictions.

    Attributes:
        module: the network, on its device, in evaluation mode.
        metadata: metadata of the network's weights.
        settings: the user's settings.
        views: the views of each image whose probabilities are averaged.
        reader: object that loads and preprocesses the images.
        calibration: calibration that turns logits into probabilities and rejects images; None for plain softmax.
        explains: whether predictions include a picture.
    """

    module: nn.Module
    metadata: dict[str, Any]
    settings: PredictSettings
    views: Views
    reader: ModelInput
    calibration: Calibration | None = None
    explains: bool = False


def predict(model: str | Path, images: str | Path | Iterable[str | Path], **options: Any) -> Iterator[Prediction]:
    """Load a trained model, and return an iterator over the predictions for all images, in order.

    Args:
        model: a run's name or folder, or a safetensors file.
        images: files, folders (searched recursively in order of name, without hidden and system files), or "-" to read
            one image, or one path per line, from standard input. A .npy file contains one image, [H, W] or [H, W, C].
        options: the other fields of `PredictSettings`; with `explain=True`, predictions include a picture.

    Raises:
        UserError: for a mistake in the arguments or for weights that cannot be used; during iteration, if a folder
            contains no images, or if standard input is empty or larger than `MAX_FILE_BYTES`.
    """
    listed = [images] if isinstance(images, str | Path) else images
    predictor = load_predictor(PredictSettings(model=str(model), images=listed, **options))
    takes_arrays = predictor.metadata["preprocessing"].takes_numbers or predictor.reader.decode == NUMBERS
    return predictions_of(predictor, _list_images(listed, (*IMAGE_EXTENSIONS, *[ARRAY_EXTENSION] * takes_arrays)))


def load_predictor(settings: PredictSettings) -> Predictor:
    """Load a trained model; raise UserError for settings or weights that cannot be used."""
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise UserError("--device cuda: PyTorch finds no GPU here: leave --device out, or use --device cpu.")
    trained = find_model(settings.model)
    run = trained.config() or TrainConfig()
    module, metadata = load_model(trained.weights)
    decode = settings.decode or metadata["preprocessing"].decode or run.decode
    megapixels = settings.max_megapixels or run.max_megapixels
    reader = ModelInput(metadata["preprocessing"], decode, megapixels * 10**6)
    module.to(settings.device or ("cuda" if has_gpu else "cpu"))
    calibration = read_calibration(trained.weights)
    if calibration is None and calibration_file(trained.weights).exists():
        print(
            f"note: '{calibration_file(trained.weights)}' belongs to other weights and is not used: calibrate "
            "these weights with scripts/evaluate.py --reject",
            file=sys.stderr,
        )
    asked = Views(settings.flip, settings.shift_pixels)
    views = checked_views(*(asked if asked.are_several or calibration is None else calibration.views), metadata)
    if calibration is not None and calibration.views != views:
        raise UserError(
            f"the model is calibrated for {calibration.views}, not for {views}: use the same flags, or calibrate "
            "again with scripts/evaluate.py --reject."
        )
    if settings.explain and metadata["preprocessing"].takes_numbers:
        raise UserError("--explain: the model was trained on arrays, which cannot be shown as pictures: leave it out.")
    return Predictor(module, metadata, settings, views, reader, calibration, bool(settings.explain))


def predictions_of(predictor: Predictor, entries: Iterator[Entry]) -> Iterator[Prediction]:
    """Yield the prediction for each entry, in order, reading entries in batches of `batch_size`."""
    class_names, task = predictor.metadata["class_names"], task_of(predictor.metadata)

    def read(entry: Entry) -> tuple[torch.Tensor, str] | ImageError:
        notes: dict[str, str] = {}
        try:
            image = predictor.reader.read(*entry, notes)
        except ImageError as error:
            return error
        return image, notes.get(entry[0], "")

    with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
        while batch := list(islice(entries, predictor.settings.batch_size)):
            images = list(pool.map(read, batch))
            readable = [image[0] for image in images if not isinstance(image, ImageError)]
            best = iter(_top_classes(predictor, torch.stack(readable)) if readable else [])
            for (path, _), image in zip(batch, images, strict=True):
                if isinstance(image, ImageError):
                    yield Prediction(path, [], [], error=image.reason)
                else:
                    probabilities, classes, picture, every = next(best)
                    labels = [class_names[number] for number in classes]
                    known, chosen = predictor.calibration, task.chosen(every)
                    is_rejected = not chosen if chosen is not None else known and probabilities[0] < known.threshold
                    several = None if chosen is None else {class_names[one]: float(every[one]) for one in chosen}
                    yield Prediction(path, labels, probabilities, image[1], "", picture, is_rejected, several)


@torch.no_grad()
def _top_classes(
    predictor: Predictor, images: torch.Tensor
) -> list[tuple[list[float], list[int], Image.Image | None, np.ndarray]]:
    """Return each image's highest probabilities, the indices of their classes, its picture, and all probabilities."""
    module = predictor.module
    images = images.to(next(module.parameters()).device)
    pictures: list[Image.Image | None] = [None] * len(images)
    with _SETTINGS, preserved_torch_settings():
        limit_threads()
        use_exact_fp32()
        task = task_of(predictor.metadata)
        probabilities = probabilities_of(module, images, predictor.views, predictor.calibration, task)
        best = probabilities.topk(min(predictor.settings.top_k, probabilities.shape[1]), dim=1)
        if predictor.explains:
            maps = activation_maps(module, images, best.indices[:, 0])
            preprocessing = predictor.metadata["preprocessing"]
            pictures = [picture_of(image, one, preprocessing) for image, one in zip(images, maps, strict=True)]
    every = probabilities.cpu().numpy()
    return list(zip(best.values.tolist(), best.indices.tolist(), pictures, every, strict=True))


def _list_images(given: Iterable[str | Path], extensions: Sequence[str]) -> Iterator[Entry]:
    for word in map(str, given):
        if word == STDIN:
            yield from _from_stdin(sys.stdin.buffer.read(MAX_FILE_BYTES + 1))
        elif is_folder(word):
            yield from ((path, None) for path in _below(word, extensions))
        else:
            yield word, None


def _from_stdin(content: bytes) -> Iterator[Entry]:
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"standard input exceeds {MAX_FILE_BYTES / 1e6:g} MB: '-' reads one image or a list of paths.")
    try:
        with Image.open(io.BytesIO(content)):
            is_image = True
    except UnidentifiedImageError:
        is_image = False
    except Exception:  # Pillow may raise any exception for data that only starts like an image
        is_image = True
    if is_image:
        yield STDIN_NAME, content
        return
    # Unlike splitlines, split("\n") splits only at line feeds.
    paths = [path for line in os.fsdecode(content).split("\n") if (path := line.removesuffix("\r"))]
    if not paths:
        raise UserError("standard input is empty: '-' reads one image, or a list of paths, one per line.")
    yield from ((path, None) for path in paths)


def _below(folder: str, extensions: Sequence[str]) -> Iterator[str]:
    """Yield the images in a folder and its subfolders."""
    found = False
    for path in _files_below(folder):
        if Path(path).suffix.lower() in extensions:
            found = True
            yield path
    if not found:
        raise UserError(f"there is no image in the folder '{folder}': expected names that end in {either(extensions)}.")


def _files_below(folder: str, above: Sequence[str] = ()) -> Iterator[str]:
    """Yield the paths of the files in a folder, and then the paths of the files in its subfolders.

    Hidden and system files are skipped; links are followed unless they lead to a folder in `above` (real paths).
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


def run(settings: PredictSettings) -> int:
    """Write predictions to standard output or a file, and return the exit code."""
    predictions = predict(**vars(settings))
    if settings.explain:
        folder = Path(os.path.expanduser(str(settings.explain)))
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--explain {settings.explain}: use a new folder, or an empty one.")
        predictions = saving_pictures(predictions, folder)
    return 1 if write_predictions(predictions, settings.format, settings.output, settings.top_k) else 0


def write_predictions(predictions: Iterator[Prediction], kind: str, path: str, top_k: int) -> int:
    """Write predictions, report unreadable images on standard error, and return the number of unreadable images.

    `kind` is "table", "csv" or "json", or empty for the format of the path's ending; an empty `path` is standard
    output. A file has a temporary name until it is complete. A UserError is raised if it cannot be written; see also
    `predict`.
    """
    if path and Path(os.path.expanduser(path)).is_dir():
        raise UserError(f"--output {path} is a folder: use a file, such as {Path(path) / 'labels.csv'}.")
    kind, unreadable = kind or OF_ENDING.get(Path(path).suffix.lower(), "table"), 0

    def readable() -> Iterator[Prediction]:
        nonlocal unreadable
        for one in predictions:
            if one.error:
                unreadable += 1
                print(f"predict: skipped {one.image!r}: {printable(one.error)}", file=sys.stderr)
                continue
            if one.note:
                print(f"predict: note on {one.image!r}: {printable(one.note)}", file=sys.stderr)
            yield one

    if path:
        file = Path(os.path.expanduser(path))
        with (
            errors_of_writing(file, "Use another --output file."),
            replacing(file, follows=True) as temporary,
            temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream,
        ):
            FORMATS[kind](readable(), stream, top_k)
    else:
        # File names may contain bytes that are not valid text; such bytes are written as they were read.
        sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        FORMATS[kind](readable(), sys.stdout, top_k)
    if unreadable:
        print(f"predict: {plural(unreadable, 'image')} could not be read", file=sys.stderr)
    return unreadable


def saving_pictures(predictions: Iterator[Prediction], folder: Path) -> Iterator[Prediction]:
    """Save each prediction's picture as `<number>-<image's name>.png` or raise a UserError; yield the prediction."""
    for number, one in enumerate(predictions, 1):
        if one.picture is not None:
            name = f"{number:05}-{first_bytes(Path(one.image).stem, LONGEST_NAME)}.png"
            with errors_of_writing(folder, "Use another --explain folder."):
                folder.mkdir(parents=True, exist_ok=True)
                with replacing(folder / name) as temporary:
                    one.picture.save(temporary, format="png")
        yield one


def _write_json(predictions: Iterator[Prediction], stream: TextIO, top_k: int) -> None:
    for one in predictions:
        pairs = zip(one.labels, one.probabilities, strict=True)
        top = [{"label": label, "probability": share} for label, share in pairs]
        several = {} if one.chosen is None else {"labels": [*one.chosen]}
        first = {"image": one.image, "label": one.label, "probability": one.probability}
        print(json.dumps({**first, **several, "top": top}), file=stream)


def _write_csv(predictions: Iterator[Prediction], stream: TextIO, top_k: int) -> None:
    is_terminal = stream.isatty()
    header: list[str] = []
    for one in predictions:
        if not header:
            header = _csv_header(len(one.labels)) + ([] if one.is_rejected is None else ["nearest"])
            stream.write(csv_line(header))
        row = [one.image, *chain(*zip(one.labels, one.probabilities, strict=True))]
        if one.is_rejected is not None:
            row[1:3], row[len(row) :] = [one.label, one.probability], [one.labels[0]]
        stream.write(csv_line([printable(str(cell)) for cell in row] if is_terminal else row))
    if not header:
        stream.write(csv_line(_csv_header(top_k)))


def _csv_header(top_k: int) -> list[str]:
    further = (f"{name}_{place}" for place in range(2, top_k + 1) for name in ("label", "probability"))
    return ["image", "label", "probability", *further]


def _write_table(predictions: Iterator[Prediction], stream: TextIO, top_k: int) -> None:
    table = Table("image", "label", "probability", *["next labels"] * (top_k > 1), box=None, header_style="bold")
    table.columns[2].justify = "right"
    for one in predictions:
        shown = [f"{printable(label)} {share:.1%}" for label, share in zip(one.labels, one.probabilities, strict=True)]
        first = (printable(one.image), printable(one.label or NONE_OF_THESE), f"{one.probability:.1%}")
        told = one.chosen or (() if one.is_rejected else one.labels[:1])
        then = [text for label, text in zip(one.labels, shown, strict=True) if label not in told]
        table.add_row(*first, *[", ".join(then)] * (top_k > 1))
    if table.row_count:
        width = None if stream.isatty() else WIDEST  # nothing is truncated without a terminal
        Console(file=stream, width=width, highlight=False, markup=False, emoji=False).print(table)


FORMATS: dict[str, Callable[[Iterator[Prediction], TextIO, int], None]] = {
    "table": _write_table,
    "csv": _write_csv,
    "json": _write_json,
}
