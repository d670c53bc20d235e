"""Writes predictions as a table, as CSV, or as one JSON object a line; to standard output or to a file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from zerovision.delivery.calibration import NONE_OF_THESE
from zerovision.delivery.predict import Prediction, predict
from zerovision.delivery.settings import PredictSettings
from zerovision.training.base.atomic_write import replacing
from zerovision.training.base.errors import UserError, printable
from zerovision.training.base.small_files import csv_line

WIDEST = 10_000  # letters of a table's line in a file
OF_ENDING = {".csv": "csv", ".json": "json", ".jsonl": "json"}
LONGEST_NAME = 100  # letters of an image's name in that of its picture


def run(settings: PredictSettings) -> int:
    """Predict as the command line says; the predictions go to standard output or a file."""
    predictions = predict(**vars(settings))
    if settings.explain:
        predictions = saving_pictures(predictions, str(settings.explain))
    return 1 if write_predictions(predictions, settings.format, settings.output, settings.top_k) else 0


def write_predictions(predictions: Iterator[Prediction], kind: str, path: str, top_k: int) -> int:
    """Write predictions, name unreadable images on standard error, and return how many there are.

    Args:
        predictions: of `zerovision.delivery.predict.predict`.
        kind: "table", "csv" or "json"; empty for what the file's name ends with.
        path: the file, written beside its name and renamed at the end; empty for standard output.
        top_k: classes of each prediction, at most.

    Raises:
        UserError: if the file cannot be written, and as `predict`.
    """
    if path and Path(os.path.expanduser(path)).is_dir():
        raise UserError(f"--output {path} is a folder: give a file, such as {Path(path) / 'labels.csv'}.")
    kind, unreadable = kind or OF_ENDING.get(Path(path).suffix.lower(), "table"), 0

    def readable() -> Iterator[Prediction]:
        nonlocal unreadable
        for one in predictions:
            if one.error:
                unreadable += 1
                print(f"predict: passed over {one.image!r}: {printable(one.error)}", file=sys.stderr)
                continue
            if one.note:
                print(f"predict: note on {one.image!r}: {printable(one.note)}", file=sys.stderr)
            yield one

    if path:
        try:
            with (
                replacing(Path(os.path.expanduser(path)), follows=True) as temporary,
                temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream,
            ):
                FORMATS[kind](readable(), stream, top_k)
        except OSError as error:
            raise UserError(f"--output {path}: cannot be written ({error.strerror or error}).") from None
    else:
        # Names of files may contain bytes that are no text: they are written as they were read.
        sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        FORMATS[kind](readable(), sys.stdout, top_k)
    if unreadable:
        print(f"predict: {unreadable} image(s) could not be read", file=sys.stderr)
    return unreadable


def saving_pictures(predictions: Iterator[Prediction], path: str) -> Iterator[Prediction]:
    """Save each prediction's picture as `<number>-<image's name>.png`, and pass the prediction on.

    Args:
        predictions: of `zerovision.delivery.predict.predict`, with pictures.
        path: of a folder, which is new or empty.

    Raises:
        UserError: for another folder, and while iterating if a picture cannot be written.
    """
    folder = Path(os.path.expanduser(path))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--explain {path}: give a new folder, or an empty one.")
    return _saved(predictions, folder)


def _saved(predictions: Iterator[Prediction], folder: Path) -> Iterator[Prediction]:
    for number, one in enumerate(predictions, 1):
        if one.picture is not None:
            name = f"{number:05}-{Path(one.image).stem[:LONGEST_NAME]}.png"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with replacing(folder / name) as temporary:
                    one.picture.save(temporary, format="png")
            except OSError as error:
                raise UserError(f"--explain {folder}: cannot be written ({error.strerror or error}).") from None
        yield one


def _write_json(predictions: Iterator[Prediction], stream: TextIO, top_k: int) -> None:
    for one in predictions:
        pairs = zip(one.labels, one.probabilities, strict=True)
        top: list[dict[str, Any]] = [{"label": label, "probability": share} for label, share in pairs]
        several = {} if one.chosen is None else {"labels": one.chosen}
        print(json.dumps({"image": one.image, **top[0], "label": one.label, **several, "top": top}), file=stream)


def _write_csv(predictions: Iterator[Prediction], stream: TextIO, top_k: int) -> None:
    is_terminal = stream.isatty()
    header: list[str] = []
    for one in predictions:
        if not header:
            header = _csv_header(len(one.labels)) + ([] if one.is_rejected is None else ["nearest"])
            stream.write(csv_line(header))
        pairs = zip(one.labels, one.probabilities, strict=True)
        row = [one.image, *(value for pair in pairs for value in pair)]
        if one.is_rejected is not None:
            row[1:2], row[len(row) :] = [one.label], [one.labels[0]]
        stream.write(csv_line([printable(str(cell)) for cell in row] if is_terminal else row))
    if not header:
        stream.write(csv_line(_csv_header(top_k)))


def _csv_header(top_k: int) -> list[str]:
    further = (f"{name}_{place}" for place in range(2, top_k + 1) for name in ("label", "probability"))
    return ["image", "label", "probability", *further]


def _write_table(predictions: Iterator[Prediction], stream: TextIO, top_k: int) -> None:
    table = Table("image", "label", "probability", box=None, header_style="bold")
    table.columns[2].justify = "right"
    if top_k > 1:
        table.add_column("then")
    for one in predictions:
        shown = [f"{printable(label)} {share:.1%}" for label, share in zip(one.labels, one.probabilities, strict=True)]
        first = (printable(one.image), printable(one.label or NONE_OF_THESE), f"{one.probabilities[0]:.1%}")
        then = shown if one.is_rejected or one.chosen else shown[1:]
        table.add_row(*first, *([", ".join(then)] if top_k > 1 else []))
    if table.row_count:
        width = None if stream.isatty() else WIDEST  # nothing is cut where there is no screen
        Console(file=stream, width=width, highlight=False, markup=False, emoji=False).print(table)


FORMATS: dict[str, Callable[[Iterator[Prediction], TextIO, int], None]] = {
    "table": _write_table,
    "csv": _write_csv,
    "json": _write_json,
}
