"""The size of the training images by epoch: small ones first cost less, and the last epochs see them in full."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zerovision.models import LARGEST_IMAGE_SIZE
from zerovision.training.base.errors import UserError, shown

MIN_IMAGE_SIZE = 8  # pixels
USAGE = "LOW:FIRST:LAST"
STEP, SMALL_STEP, SMALL_BELOW = 32, 4, 128  # pixels


@dataclass(frozen=True)
class SizeRamp:
    """Progressive resizing as in ffcv-imagenet's `get_resolution`.

    Attributes:
        low: Side in pixels of the images of the epochs up to `first`, counted from 0.
        first: The last epoch at `low`.
        last: The first epoch at full size, if it is after `first`.
    """

    low: int
    first: int
    last: int

    def size(self, epoch: int, full: int) -> int:
        """Return the side in pixels in an epoch: between `first` and `last` on a line from `low` to `full`.

        Rounded to the nearest multiple of 32, or of 4 if images are smaller than 128 pixels.
        """
        if epoch <= self.first:
            return self.low
        if epoch >= self.last:
            return full
        between = self.low + (full - self.low) * (epoch - self.first) / (self.last - self.first)
        step = STEP if full >= SMALL_BELOW else SMALL_STEP
        return min(max(round(between / step) * step, self.low), full)

    def sizes(self, full: int) -> list[int]:
        """Return the sides that occur, in rising order."""
        return sorted({self.size(epoch, full) for epoch in range(self.first, self.last + 2)})


def size_ramp(value: str) -> SizeRamp | None:
    """Read a value of `--progressive-size`; None for an empty one.

    Raises:
        UserError: It is not of the form LOW:FIRST:LAST, or its numbers are out of order.
    """
    if not value:
        return None
    numbers = [int(word) for word in value.split(":")] if re.fullmatch(r"[0-9]{1,6}(:[0-9]{1,6}){2}", value) else []
    if not (numbers and MIN_IMAGE_SIZE <= numbers[0] <= LARGEST_IMAGE_SIZE and numbers[1] <= numbers[2]):
        raise UserError(
            f"--progressive-size {shown(value)}: expected {USAGE}, such as 128:6:13 for images of 128 pixels in the "
            f"first 7 epochs and full ones after 13; at least {MIN_IMAGE_SIZE} pixels, FIRST not above LAST."
        )
    return SizeRamp(*numbers)
