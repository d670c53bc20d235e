"""Turns an image into a trained model's input, for `predict`, the `serve` page, and `preprocess`."""

from __future__ import annotations

import os
from functools import cached_property

import numpy as np
import torch
from PIL import Image, ImageOps

from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.data.augment import evaluation_transform
from zerovision.training.data.reading.decode import MAX_PIXELS, Decoder, make_decoder, reduced, to_channels
from zerovision.training.data.reading.files import is_array, named, read_file
from zerovision.training.data.reading.image_numbers import BYTES, read_numbers
from zerovision.training.data.settings import NUMBERS


class ModelInput:
    """Reads images in the same way as evaluation during training.

    Args:
        preprocessing: The model's preprocessing.
        decode: A name in `DECODERS`; by default, the decoder used in training.
        max_pixels: Largest number of pixels in an image file; see `decode`.
    """

    def __init__(self, preprocessing: Preprocessing, decode: str = "", max_pixels: int = MAX_PIXELS) -> None:
        self.preprocessing, self.max_pixels = preprocessing, max_pixels
        self.decode, self._transform = decode or preprocessing.decode or "cpu", evaluation_transform(preprocessing)

    def read(self, path: str, content: bytes | None = None, found: dict[str, str] | None = None) -> torch.Tensor:
        """Return the input for an image file, or for a .npy file of one image: float32 [C, S, S].

        Args:
            path: Path of the file.
            content: Contents of the file; None to read the file.
            found: Dictionary to which notes are added by path; see `named`.

        Raises:
            ImageError: If the image cannot be used.
        """
        content, values = read_file(path) if content is None else content, self.preprocessing.values
        with named(path, found) as notes:
            if values != BYTES or self.decode == NUMBERS or is_array(content):
                return self._transform(read_numbers(content, values, self.preprocessing.channels, self.max_pixels))
            return self._of_pixels(self._decoder(content, notes=notes))

    def read_picture(self, image: Image.Image) -> torch.Tensor:
        """Like `read`, but for an image opened with Pillow; its file is read unless the image is already decoded."""
        content = _undecoded(image)
        if content is not None:
            return self.read(os.fspath(getattr(image, "filename", "")) or "the image", content)
        pixels = to_channels(ImageOps.exif_transpose(image), self.preprocessing.channels)
        return self._of_pixels(reduced(pixels, max(self.preprocessing.sides) if self.decode == "cpu" else 0))

    @cached_property
    def _decoder(self) -> Decoder:  # created on demand: some numbers of channels have no decoder
        return make_decoder(self.decode, max(self.preprocessing.sides), self.preprocessing.channels, self.max_pixels)

    def _of_pixels(self, pixels: np.ndarray) -> torch.Tensor:
        return self._transform(torch.from_numpy(pixels).permute(2, 0, 1))


def _undecoded(image: Image.Image) -> bytes | None:
    """Return the contents of an image's file if Pillow has read only the header, otherwise None."""
    stream = getattr(image, "fp", None)
    if stream is None or not getattr(image, "tile", None) or image.tell():  # decoded, or not the first frame
        return None
    place = stream.tell()
    stream.seek(0)
    content = stream.read()
    stream.seek(place)
    return content
