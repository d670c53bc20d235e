"""Writes the files of an evaluation, and the files at the end of a run: also the model card and the report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from zerovision.delivery.activation_map import Explain, explainer
from zerovision.training.base.errors import printable
from zerovision.training.base.files import replacing_folder, write_csv, write_json
from zerovision.training.base.run_folder import (
    EVALUATION,
    REPORT,
    SCORES,
    TEST_EVALUATION,
    TYPICAL,
    WHY,
    WORST,
    RunFolder,
    shown_path,
)
from zerovision.training.checkpoint.weights import load_model, read_metadata
from zerovision.training.data.augment import viewable
from zerovision.training.data.reading.image_numbers import stretched
from zerovision.training.data.reading.sources import Source
from zerovision.training.observe.evaluation import check_replaceable, dense_confusion, read_scores
from zerovision.training.observe.loggers.confusion import confusion_picture

LARGEST_MATRIX = 1000  # classes; with more, neither a picture nor a table of all pairs is written
THUMBNAIL_PIXELS = 128
COLUMNS, TILE_GAP, LINE_PIXELS, FONT_PIXELS = 6, 8, 16, 12
LONGEST_NAME = 18
MOST_SECONDS_OF_REASONS, IMAGES_AT_A_TIME = 10.0, 8
BLACK, WRONG = "black", "#b00020"


def write_evaluation(
    folder: Path,
    facts: dict[str, Any],  # from `describe_scores`, possibly with additional keys
    read_image: Callable[[int], torch.Tensor],  # by index, uint8 or float32 [C, H, W]
    explain: Explain | None = None,  # None if the model cannot be explained
) -> None:
    """Write all files of an evaluation, replacing those of an earlier one; if this fails, the folder is not changed."""
    class_names = [one["name"] for one in facts["classes"]]
    check_replaceable(folder)
    with replacing_folder(folder) as new:
        write_json(new / SCORES, facts)
        write_csv(new / "per_class.csv", list(facts["classes"][0]), (one.values() for one in facts["classes"]))
        if "task" not in facts:  # with several labels per image, there is no confusion matrix
            _write_confusion(new, facts["confusion"], class_names)
            _write_worst(new, facts["worst"], class_names, read_image)
            (new / TYPICAL).mkdir()
            for number, one in enumerate(facts["typical"]):
                thumbnail(read_image(one["index"])).save(new / TYPICAL / f"{number:03d}.png")
            if explain is not None:
                _write_reasons(new, facts, read_image, explain)


def thumbnail(image: torch.Tensor, side: int = THUMBNAIL_PIXELS) -> Image.Image:
    """Return a thumbnail of an image [C, H, W] that fits into `side` x `side` pixels.

    Small images are enlarged by a whole factor. In float32 images, the smallest value becomes black, and the largest
    value white.
    """
    image = viewable(image)
    if image.is_floating_point():
        image = (255 * stretched(image)).round().to(torch.uint8)
    picture = to_pil_image(image)
    longest = max(picture.size)
    if longest <= side:
        scale = side // longest
        return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    picture.thumbnail((side, side))
    return picture


def _write_confusion(folder: Path, cells: Sequence[Sequence[int]], class_names: Sequence[str]) -> None:
    """Write the counts of all pairs of classes, or only of the pairs that occur if there are too many classes."""
    if len(class_names) > LARGEST_MATRIX:
        named = ([class_names[true], class_names[predicted], count] for true, predicted, count in cells)
        write_csv(folder / "confusion.csv", ("true", "predicted", "samples"), named)
        return
    confusion = dense_confusion(cells, len(class_names))
    rows = ([name, *counts] for name, counts in zip(class_names, confusion.tolist(), strict=True))
    write_csv(folder / "confusion.csv", ("true \\ predicted", *class_names), rows)
    Image.fromarray(confusion_picture(confusion, class_names)).save(folder / "confusion.png")


def _write_worst(
    folder: Path,
    worst: Sequence[dict[str, Any]],
    class_names: Sequence[str],
    read_image: Callable[[int], torch.Tensor],
) -> None:
    """Write the worst samples as separate pictures, as a contact sheet, and as a table."""
    (folder / WORST).mkdir()
    pictures = [thumbnail(read_image(one["index"])) for one in worst]
    rows, captions = [], []
    for number, (one, picture) in enumerate(zip(worst, pictures, strict=True)):
        name = f"{WORST}/{number:03d}.png"
        picture.save(folder / name)
        true, predicted = class_names[one["label"]], class_names[one["prediction"]]
        rows.append([name, one["name"], true, predicted, one["confidence"], one["loss"]])
        text = f"{printable(predicted)[:LONGEST_NAME]}  {one['confidence']:.0%}"
        colour = BLACK if true == predicted else WRONG
        captions.append([(f"true {printable(true)[:LONGEST_NAME]}", BLACK), (text, colour)])
    write_csv(folder / f"{WORST}.csv", ("picture", "image", "true", "predicted", "confidence", "loss"), rows)
    contact_sheet(pictures, captions).save(folder / f"{WORST}.png")


def _write_reasons(
    folder: Path, facts: dict[str, Any], read_image: Callable[[int], torch.Tensor], explain: Explain
) -> None:
    """Write a picture of what led to the predicted class next to each sample's picture, until time runs out."""
    end = time.monotonic() + MOST_SECONDS_OF_REASONS
    samples = [(kind, number, one) for kind in (WORST, TYPICAL) for number, one in enumerate(facts[kind])]
    for start in range(0, len(samples), IMAGES_AT_A_TIME):
        some = samples[start : start + IMAGES_AT_A_TIME]
        if time.monotonic() > end:
            return
        images = [read_image(one["index"]) for _, _, one in some]
        try:
            pictures = explain(images, [one["prediction"] for _, _, one in some])
        except Exception:  # no feature map, or out of memory: not worth failing the evaluation
            return
        for (kind, number, _), picture in zip(some, pictures, strict=True):
            thumbnail(pil_to_tensor(picture)).save(folder / kind / f"{number:03d}{WHY}.png")


def contact_sheet(pictures: Sequence[Image.Image], captions: Sequence[Sequence[tuple[str, str]]]) -> Image.Image:
    """Arrange pictures in rows, with two lines of (text, color) below each picture."""
    font = ImageFont.load_default(FONT_PIXELS)
    width, height = THUMBNAIL_PIXELS + TILE_GAP, THUMBNAIL_PIXELS + 2 * LINE_PIXELS + TILE_GAP
    lines = max(-(-len(pictures) // COLUMNS), 1)
    sheet = Image.new("RGB", (COLUMNS * width + TILE_GAP, lines * height + TILE_GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left, top = TILE_GAP + number % COLUMNS * width, TILE_GAP + number // COLUMNS * height
        shift = [(THUMBNAIL_PIXELS - side) // 2 for side in picture.size]
        sheet.paste(picture, (left + shift[0], top + shift[1]))
        for line, (text, colour) in enumerate(caption):
            draw.text((left, top + THUMBNAIL_PIXELS + 2 + line * LINE_PIXELS), text, colour, font)
    return sheet


def leave_files(folder: RunFolder, sources: Mapping[str, Source], *, with_card: bool, with_report: bool) -> list[str]:
    """Write the files about the best epoch so far; errors are returned as notes, so that they cannot fail the run.

    Args:
        folder: the run's folder.
        sources: images of each part: "val", and "test" if the data has a test part.
        with_card: whether to write the model card, which is meant only for finished runs.
        with_report: whether to write the report.

    Returns:
        A line with the report's path, and one line for each file that could not be written.
    """
    from zerovision.delivery.publish import (
        write_model_card,  # imported late, so that startup does not load the page libraries
    )
    from zerovision.delivery.report.page import write_report

    report = folder.path / REPORT
    steps: dict[str, Callable[[], object]] = {
        "evaluation": lambda: _write_evaluation(folder, EVALUATION, sources["val"])
    }
    if "test" in sources:
        steps["evaluation of the test part"] = lambda: _write_evaluation(folder, TEST_EVALUATION, sources["test"])
    if with_card:
        steps["model card"] = lambda: write_model_card(folder.path)
    if with_report:
        steps["report"] = lambda: write_report([folder.path], report)
    notes = {}
    for name, write in steps.items():
        try:
            write()
        except Exception as error:  # whatever the cause
            notes[name] = f"note: the {name} could not be written ({type(error).__name__}: {error})"
    shown = {"report": f"report       {shown_path(report)}"} if with_report else {}
    return [*(shown | notes).values()]


def _write_evaluation(folder: RunFolder, name: str, source: Source) -> None:
    facts = read_scores(folder.path / name)
    # If a run was killed between writing the weights and the scores, the scores are from an older epoch.
    if facts is not None and facts["epoch"] == read_metadata(folder.weights)["extra"].get("epoch"):
        explain = None
        with contextlib.suppress(Exception):  # for example, for weights without a classifier
            module, metadata = load_model(folder.weights)
            explain = explainer(module, metadata["preprocessing"])
        write_evaluation(folder.path / name, facts, source.read, explain)
