"""Adds the preprocessing to an exported file, which then maps pictures of any size to the probabilities of `predict`.

PyTorch resizes 8-bit images with integers: first the columns, then the rows, with 16-bit weights, rounding after each
step. This module does the same with two matrix products, because every runtime supports matrix products and few support
an antialiased Resize. The sums are whole numbers below 2^24, which float32 represents exactly, unless a picture is
shrunk by a very large factor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchvision.transforms import InterpolationMode

from zerovision.delivery.calibration import NONE_OF_THESE, PLAIN, Calibration
from zerovision.delivery.export.output_folder import PICTURE_STEPS
from zerovision.delivery.views import probabilities_of
from zerovision.models import sides
from zerovision.training.base.errors import UserError
from zerovision.training.data.augment import FILTERS, resize_weights
from zerovision.training.data.reading.image_numbers import BYTES
from zerovision.training.tasks.labels import task_of

PICTURES, ANSWERS = "pictures", ("probabilities", "class")
WEIGHT_BITS, MOST_WEIGHT_BITS = 15, 22  # bits of PyTorch's integer weights, without the sign; bits of their fractions
EXAMPLE = (2, 37, 53)  # pictures, height and width; sizes that are 1 or equal would become constants


class FromPictures(nn.Module):
    """Wraps a network with the steps that `predict` performs before and after it.

    The network maps float32 [N, C, H, W] to logits [N, classes]. A UserError is raised if its images are not 8-bit, or
    if a filter without antialiasing resizes them.
    """

    mean: torch.Tensor
    std: torch.Tensor
    bars: torch.Tensor

    def __init__(self, network: nn.Module, metadata: dict[str, Any], calibration: Calibration | None) -> None:
        super().__init__()
        self.network, self.preprocessing, self.calibration = network, metadata["preprocessing"], calibration
        filter_name, values = self.preprocessing.interpolation, self.preprocessing.values
        if values != BYTES or InterpolationMode(filter_name) not in FILTERS:
            raise UserError(
                f"--with-preprocessing: the model takes {values} values, resized by {filter_name}, but a file supports "
                f"{BYTES}, resized by {' or '.join(mode.value for mode in FILTERS)}: leave it out."
            )
        self.task = task_of(metadata)
        self.views = calibration.views if calibration else PLAIN
        for name in ("mean", "std"):  # vectors, which are not changed when matrices are stored in 16 bits
            self.register_buffer(name, torch.tensor(getattr(self.preprocessing, name)), persistent=False)
        bars = (255 * torch.tensor(self.preprocessing.mean, dtype=torch.float64)).round().clamp(0, 255).float()
        self.register_buffer("bars", bars, persistent=False)  # see `padded`

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map pictures, uint8 [N, H, W, C], to probabilities, float32 [N, classes], and classes, int64 [N].

        The class is the most probable one, or -1 if its probability is below the calibration's threshold.
        """
        probabilities = probabilities_of(self.network, self.prepared(pictures), self.views, self.calibration, self.task)
        best, classes = probabilities.max(1)
        return probabilities, torch.where(best < (self.calibration.threshold if self.calibration else 0.0), -1, classes)

    def prepared(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return the network's input, float32 [N, C, H, W]."""
        return ((self.resized(pictures) / 255 - self.mean) / self.std).permute(0, 3, 1, 2)

    def resized(self, pictures: torch.Tensor) -> torch.Tensor:
        """Resize and crop or pad uint8 [N, h, w, C] as the run did; return whole numbers as float32 [N, H, W, C]."""
        values = pictures.permute(0, 3, 1, 2).float()
        # Computed with tensors, not in Python, so that the sizes are part of the graph; float64 is exact.
        pixels = [torch.arange(side, dtype=torch.float64) for side in pictures.shape[1:3]]
        there = torch.stack([numbers.max() + 1 for numbers in pixels])
        resized, first = self._geometry(there)
        positions = [first[axis] + torch.arange(side) for axis, side in enumerate(self.preprocessing.sides)]
        inside = [(positions[axis] >= 0) & (positions[axis] < resized[axis]) for axis in (0, 1)]
        rows, columns = (self._weights(pixels[axis], there[axis], resized[axis], positions[axis]) for axis in (0, 1))
        values = _whole(values @ columns.T)
        values = _whole(rows @ values).permute(0, 2, 3, 1)
        if self.preprocessing.fit == "pad":
            is_picture = (inside[0][:, None] & inside[1])[..., None]
            values = torch.where(is_picture, values, self.bars)
        return values

    def _geometry(self, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sides of the resized picture, and where in it the output's first pixel is, each float64 [2]."""
        size, resize_size = self.preprocessing.image_size, self.preprocessing.resize_size
        pads, covered = self.preprocessing.fit == "pad", size if resize_size is None else resize_size
        wanted, around = (torch.tensor(sides(given), dtype=torch.float64) for given in (size, covered))
        if not pads and resize_size is None:
            return wanted, torch.zeros_like(wanted)
        # Scale by the side that fills the shape when padding, or by the side that just covers the shape when cropping.
        is_taller = around[0] * there[1] <= around[1] * there[0]
        axis = torch.where(is_taller, 0, 1) if pads else torch.where(is_taller, 1, 0)
        resized = around[axis] * there / there[axis]
        if pads:
            resized = resized.round().clamp(min=1)
            return resized, -((wanted - resized) / 2).floor()
        return resized.floor(), ((resized.floor() - wanted) / 2).round()

    def _weights(
        self, pixels: torch.Tensor, side: torch.Tensor, resized: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return PyTorch's resize weights for 8-bit images, float32 [positions, side]."""
        step = side / resized
        # Add a row for the first pixel of the side, because the largest weights are at the edges, which may be cropped.
        inside = torch.cat([torch.minimum(positions.clamp(min=0), resized - 1), torch.zeros_like(positions[:1])])
        mode = InterpolationMode(self.preprocessing.interpolation)
        weights = resize_weights(pixels, step * (inside + 0.5), step.clamp(min=1), mode)
        bits = ((2**WEIGHT_BITS - 0.5) / weights.max()).log2().ceil() - 1
        one = torch.exp2(bits.clamp(max=MOST_WEIGHT_BITS))
        return ((weights * one + torch.where(weights < 0, -0.5, 0.5)).trunc() / one).float()[:-1]

    def describe(self, use: dict[str, Any]) -> dict[str, Any]:
        """Return the contents of preprocessing.json, adapted to the file's inputs and outputs."""
        output = {key: value for key, value in use["output"].items() if key != "probabilities"}
        shape = ["batch", "height", "width", self.preprocessing.channels]
        return use | {
            "input": {"name": PICTURES, "dtype": "uint8", "shape": shape, "layout": "NHWC"},
            "output": output | {"name": ANSWERS[0]},
            "class": {
                "name": ANSWERS[1],
                "dtype": "int64",
                "shape": ["batch"],
                "threshold": self.calibration.threshold if self.calibration else 0.0,
                "below": f"-1 ({NONE_OF_THESE})",
            },
            "steps": PICTURE_STEPS,
        }


def _whole(values: torch.Tensor) -> torch.Tensor:
    return (values + 0.5).floor().clamp(0, 255)
