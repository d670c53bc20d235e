"""Writes predictions as a table, as CSV, or as one JSON object a line; to standard output or a file that is whole."""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.table import Table

from delivery.csv_cells import inert
from delivery.prediction import Prediction
from training.checkpoint.atomic_write import replacing
from training.errors import UserError, printable


class Output(Protocol):
    """One way of writing predictions."""

    def write(self, prediction: Prediction) -> None:
        """Take one prediction."""

    def close(self) -> None:
        """Write what is left."""


@contextlib.contextmanager
def open_output(kind: str, path: str, top_k: int) -> Iterator[Output]:
    """Open a destination for predictions.

    Args:
        kind: "table", "csv" or "json".
        path: the file, written beside its name and renamed at the end; empty for standard output.
        top_k: classes of each prediction.

    Raises:
        UserError: where the file cannot be written.
    """
    make: Callable[[TextIO, int], Output] = OUTPUTS[kind]
    if not path:
        # Names of files may hold bytes that are no text: they go out as they came in.
        sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        output = make(sys.stdout, top_k)
        yield output
        output.close()
        return
    target = Path(path).expanduser()
    try:
        with (
            replacing(target) as temporary,
            temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream,
        ):
            output = make(stream, top_k)
            yield output
            output.close()
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror or error}).") from None


class _Json:
    def __init__(self, stream: TextIO, top_k: int) -> None:
        self._stream = stream

    def write(self, prediction: Prediction) -> None:
        pairs = zip(prediction.labels, prediction.probabilities, strict=True)
        top: list[dict[str, Any]] = [{"label": label, "probability": share} for label, share in pairs]
        print(json.dumps({"image": prediction.image, **top[0], "top": top}), file=self._stream)

    def close(self) -> None:
        pass


class _Csv:
    def __init__(self, stream: TextIO, top_k: int) -> None:
        self._is_terminal = stream.isatty()
        self._writer = csv.writer(stream, lineterminator="\n")
        header = ["image", "label", "probability"]
        for place in range(2, top_k + 1):
            header += [f"label_{place}", f"probability_{place}"]
        self._writer.writerow(header)

    def write(self, prediction: Prediction) -> None:
        pairs = zip(prediction.labels, prediction.probabilities, strict=True)
        row = inert([prediction.image, *(value for pair in pairs for value in pair)])
        self._writer.writerow([printable(cell) for cell in map(str, row)] if self._is_terminal else row)

    def close(self) -> None:
        pass


class _Table:
    def __init__(self, stream: TextIO, top_k: int) -> None:
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._table = Table("image", "label", "probability", box=None, header_style="bold")
        self._table.columns[2].justify = "right"
        if top_k > 1:
            self._table.add_column("then")

    def write(self, prediction: Prediction) -> None:
        pairs = list(zip(prediction.labels, prediction.probabilities, strict=True))
        row = [printable(prediction.image), printable(pairs[0][0]), f"{pairs[0][1]:.1%}"]
        if len(pairs) > 1:
            row.append(", ".join(f"{printable(label)} {share:.1%}" for label, share in pairs[1:]))
        self._table.add_row(*row)

    def close(self) -> None:
        if self._table.row_count:
            self._console.print(self._table)


OUTPUTS: dict[str, Callable[[TextIO, int], Output]] = {"table": _Table, "csv": _Csv, "json": _Json}
