"""Draws a confusion matrix with Pillow, because a plotting library would take a tenth of the time of a short epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from zerovision.training.base.errors import printable

LARGEST_WITH_NUMBERS = 20  # classes; a larger matrix shows neither numbers nor names
LONGEST_NAME = 24
LIGHT, DARK = np.array([247, 251, 255]), np.array([8, 48, 107])
CELL_PIXELS, SMALL_CELL_PIXELS, CAPTION_PIXELS, FONT_PIXELS = 30, 4, 24, 12
CAPTION = "rows: true class; columns: predicted class, in the same order"


def confusion_picture(confusion: torch.Tensor, class_names: Sequence[str]) -> np.ndarray:
    """Draw a confusion matrix; darker cells contain a larger share of the true class.

    Args:
        confusion: int64 [classes, classes]; rows are true classes, columns are predicted classes.
        class_names: names of the classes.

    Returns:
        The picture, uint8 [height, width, 3], with the matrix at its right edge.
    """
    has_numbers = len(confusion) <= LARGEST_WITH_NUMBERS
    cell = CELL_PIXELS if has_numbers else SMALL_CELL_PIXELS
    names = [printable(name)[:LONGEST_NAME] for name in class_names] if has_numbers else []
    font = ImageFont.load_default(FONT_PIXELS)
    side = cell * len(confusion)
    left = int(max(8 + max((font.getlength(name) for name in names), default=0), font.getlength(CAPTION) - side))
    share = (confusion / confusion.sum(1, keepdim=True).clamp_min(1)).numpy()
    cells = (LIGHT + share[..., None] * (DARK - LIGHT)).round().astype(np.uint8)
    picture = Image.new("RGB", (left + side, side + CAPTION_PIXELS), "white")
    picture.paste(Image.fromarray(cells).resize((side, side), Image.Resampling.NEAREST), (left, 0))
    draw = ImageDraw.Draw(picture)
    draw.text((left + side, side + CAPTION_PIXELS / 2), CAPTION, "black", font, anchor="rm")
    for row, name in enumerate(names):
        draw.text((left - 4, (row + 0.5) * cell), name, "black", font, anchor="rm")
        for column in range(len(confusion)):
            color = "white" if share[row, column] > 0.5 else "black"
            center = (left + (column + 0.5) * cell, (row + 0.5) * cell)
            draw.text(center, str(int(confusion[row, column])), color, font, anchor="mm")
    return np.asarray(picture)
