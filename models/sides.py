"""Image sizes in configurations, descriptions and preprocessing: one value for height and width."""

from __future__ import annotations

import re

ImageSize = int | str
"""The side of square images in pixels, such as 224; 'HEIGHTxWIDTH' for other images, such as '224x448'."""

_SIDES = re.compile(r"[1-9][0-9]{0,8}x[1-9][0-9]{0,8}")


def sides(size: ImageSize) -> tuple[int, int]:
    """Return height and width in pixels."""
    height, _, width = str(size).partition("x")
    return int(height), int(width or height)


def size_of(height: int, width: int) -> ImageSize:
    """Return the image size for a height and a width in pixels."""
    return height if height == width else f"{height}x{width}"


def read_size(word: str) -> ImageSize:
    """Parse a size that a user typed.

    Raises:
        ValueError: if `word` is not a size.
    """
    return size_of(*sides(word)) if _SIDES.fullmatch(word) else int(word)
