"""Images as numbers, of any type and number of bits, and as the input of a trained model.

Whole numbers are divided by the largest value of their type, as in torchvision's `ToDtype(scale=True)`: uint16 ranges
from 0 to 1, int16 from -1 to 1. Floating-point numbers are not changed, and must be in 0..1.
"""

from __future__ import annotations

import io
import os
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile
from torchvision.transforms.v2.functional import to_dtype

from zerovision.models.weights_metadata import BYTES, VALUE_TYPES, Preprocessing
from zerovision.training.base.errors import UserError, one_line
from zerovision.training.base.units import plural
from zerovision.training.data.augment import BoxChooser, evaluation_transform
from zerovision.training.data.reading.decode import (
    BITS_PER_SAMPLE,
    CHANNEL_MODES,
    MAX_PIXELS,
    Decoder,
    crop,
    is_deep_grey,
    load,
    make_decoder,
    opened,
    reduced,
    to_channels,
    white_of,
)
from zerovision.training.data.reading.files import ARRAY_EXTENSION, ImageError, Refused, is_array, named, read_file
from zerovision.training.data.settings import NUMBERS

if TYPE_CHECKING:
    from zerovision.training.data import DataOptions
    from zerovision.training.data.images import Images

FLOATS = "float32"
SMALLEST_STD = 1e-6  # for a constant channel; no smaller value is allowed in weights files
SMALLEST_BYTE_STD = 1e-4  # for a constant channel of bytes: the last decimal of the mean
VALUES_AT_A_TIME = 2**22  # that are copied
SMALLEST_RANGE = 1e-12  # for a constant image


def to_values(numbers: np.ndarray, name: str) -> tuple[torch.Tensor, str]:
    """Return the numbers of images as float32, or unchanged if uint8, and the name of their original type.

    The numbers may have any shape and byte order; `name` is for messages. Raise a UserError if the type is not
    supported, or floating-point numbers are not in 0..1.
    """
    kind = FLOATS if numbers.dtype.kind == "f" else numbers.dtype.name
    if kind not in VALUE_TYPES:
        raise UserError(f"{name} has {numbers.dtype} numbers: use uint8, uint16, int16, or floats from 0 to 1.")
    if kind == FLOATS:
        numbers = numbers.astype(np.float32)
        low, high = numbers.min(initial=0), numbers.max(initial=0)
        if not (low >= 0 and high <= 1):  # also true for NaN
            raise UserError(
                f"{name} has floats from {low:g} to {high:g}, whose scale is unknown: use (x - LOW) / (HIGH - LOW) "
                "with fixed LOW and HIGH, so that all values, including those of later images, are from 0 to 1."
            )
    tensor = torch.from_numpy(np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("=")))
    return (tensor if kind == BYTES else to_dtype(tensor, torch.float32, scale=True)), kind


def stretched(images: torch.Tensor) -> torch.Tensor:
    """Scale float32 images for display: the smallest value in all images becomes 0, the largest 1."""
    low, high = images.min(), images.max()
    return (images - low) / (high - low).clamp_min(SMALLEST_RANGE)


def statistics(images: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return the mean and standard deviation per channel of uint8 or float32 [N, C, H, W], as values in 0..1.

    The values are rounded, to 4 decimals for bytes and to 6 digits for floats, so that they are the same with any
    number of threads. The deviation is at least the rounding step of the mean, even for a constant channel.
    """
    is_bytes = images.dtype == torch.uint8
    means, stds = [], []
    for channel in images.unbind(1):
        parts = [part.numpy() for part in channel.split(max(1, VALUES_AT_A_TIME // channel[0].numel()))]
        mean = sum(part.sum(dtype=np.float64) for part in parts) / channel.numel()
        squares = sum(np.square(np.subtract(part, mean, dtype=np.float64)).sum() for part in parts)
        std = (squares / channel.numel()) ** 0.5
        if is_bytes:
            means.append(round(float(mean / 255), 4))
            stds.append(max(round(float(std / 255), 4), SMALLEST_BYTE_STD))
        else:
            means.append(float(f"{mean:.6g}"))
            stds.append(max(float(f"{std:.6g}"), SMALLEST_STD, 1e-5 * abs(means[-1])))
    return means, stds


LITTLE_OF_RANGE = 1 / 8  # 12-bit numbers in 16 bits use less than this
_PNG_BITS = 24  # position of the bit depth in a PNG


def read_numbers(content: bytes, wanted: str, channels: int, max_pixels: int = MAX_PIXELS) -> torch.Tensor:
    """Return an image for `evaluation_transform`: uint8 or float32 [C, H, W], scaled as in `to_values`.

    The content is a .npy file of one image, [H, W] or [H, W, C], or an image file. If `channels` is 3, gray images are
    read as three equal channels. Raise Refused if the file cannot be read, or has another type or number of channels.
    """
    numbers = _numbers_in(content, wanted, max_pixels)
    if numbers.shape[-1] not in (channels, 1 if channels == 3 else channels):
        raise Refused(f"its shape is {list(numbers.shape)}, but the model takes [height, width, {channels}]")
    try:
        image, kind = to_values(numbers, "it")
    except UserError as error:
        raise Refused(str(error)) from None
    if kind != wanted:
        raise Refused(f"it has {kind} values, but the model takes {wanted}")
    return image.permute(2, 0, 1).expand(channels, -1, -1)


def kind_of_numbers(images: Images, options: DataOptions) -> tuple[str, int]:
    """Return the type (see `to_values`) and number of channels of the first image, or raise its UserError.

    If bad images are skipped, it is the first image that can be used.
    """

    def kind(row: int) -> tuple[str, int]:
        with named(name := images.name(row)):
            numbers = _numbers_in(images.content(row), "uint16", options.max_megapixels * 10**6)
        return to_values(numbers, name)[1], numbers.shape[-1]

    for row in range(0 if options.bad_images == "error" else len(images)):
        with suppress(UserError):
            return kind(row)
    return kind(0)


def note_unused_range(images: Images, max_pixels: int) -> list[str]:
    """Return a note if sampled images with more than 8 bits use little of their range."""
    ranges = []
    for row in images.spaced_rows():
        with suppress(ImageError):  # the loader reports this error
            ranges.append(_whole_range(images.content(row), max_pixels))
    found = [each for each in ranges if each is not None]
    high, white = max(found, key=lambda each: each[0] / each[1], default=(0, 1))
    if not 0 < high < LITTLE_OF_RANGE * white:
        return []
    return [
        f"the largest value in {plural(len(found), 'image')} of more than 8 bits is {high} of {white}: read as 8 bits "
        f"they have {high * 255 // white + 1} of 256 levels; --decode numbers keeps all (for colors: saved as "
        f"{ARRAY_EXTENSION} files)"
    ]


def decode_numbers(data: bytes, choose: BoxChooser | None, notes: list[str] | None, **options: Any) -> np.ndarray:
    """Like `decode`, but return the numbers in a file, uint8 or float32 [h, w, C], given options of `read_numbers`."""
    return crop(read_numbers(data, **options).permute(1, 2, 0).numpy(), choose)


def _numbers_in(content: bytes, wanted: str, max_pixels: int) -> np.ndarray:
    """Return the numbers in a file, [H, W, C]; gray images have one channel."""
    if is_array(content):
        try:
            numbers = np.load(io.BytesIO(content), allow_pickle=False)
        except Exception as error:  # a damaged file may raise any exception, for example if its header has a huge size
            raise Refused(f"not a readable .npy file ({one_line(error)})") from None
    else:
        numbers = load(content, max_pixels, lambda image: _numbers_of(image, content))
        if numbers.dtype == np.int32 and wanted != FLOATS and numbers.size:  # as Pillow returns some 16-bit files
            limits = np.iinfo(wanted)
            if limits.min <= numbers.min() and numbers.max() <= limits.max:
                numbers = numbers.astype(wanted)
    if numbers.ndim not in (2, 3) or not numbers.size:
        raise Refused(f"its shape is {list(numbers.shape)}, not [height, width] or [height, width, channels]")
    return numbers[..., None] if numbers.ndim == 2 else numbers


def _numbers_of(image: Image.Image, content: bytes) -> np.ndarray:
    """Return the values in an image file in their own dtype, [H, W] or [H, W, C]; palettes and the like become RGB."""
    is_grey, bits = is_deep_grey(image), _bits_of(image, content)
    if bits > 8 and not is_grey:
        raise ValueError(f"{bits}-bit colors, which Pillow reads as 8-bit: save it as {ARRAY_EXTENSION}")
    return np.array(image if is_grey or image.mode in CHANNEL_MODES.values() else image.convert("RGB"))


def _bits_of(image: Image.Image, content: bytes) -> int:
    """Return the bits per channel of a PNG or TIFF file, or 8 for other files."""
    if isinstance(image, TiffImageFile):
        return max(image.tag_v2.get(BITS_PER_SAMPLE, (8,)))
    return content[_PNG_BITS] if image.format == "PNG" else 8


def _whole_range(data: bytes, max_pixels: int) -> tuple[int, int] | None:
    """Return the largest value in an integer image with more than 8 bits, and the value that becomes white.

    Return None for all other images, and for unreadable images.
    """

    def largest(image: Image.Image) -> tuple[int, int]:
        if is_deep_grey(image):
            return int(np.asarray(image).max()), white_of(image)
        return int(np.asarray(image.convert("RGB")).max()) << 8, 65535  # Pillow reads the upper 8 bits

    with suppress(Refused), opened(data, max_pixels) as image:  # the loader reports unreadable images
        is_deep = image.mode != "F" and (is_deep_grey(image) or _bits_of(image, data) > 8)
        return load(data, max_pixels, largest) if is_deep else None
    return None


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
        stream = getattr(image, "fp", None)
        # Pillow has read only the header, and is at the first frame
        if stream is not None and getattr(image, "tile", None) and not image.tell():
            place = stream.tell()
            stream.seek(0)
            content = stream.read()
            stream.seek(place)
            return self.read(os.fspath(getattr(image, "filename", "")) or "the image", content)
        pixels = to_channels(ImageOps.exif_transpose(image), self.preprocessing.channels)
        return self._of_pixels(reduced(pixels, max(self.preprocessing.sides) if self.decode == "cpu" else 0))

    @cached_property
    def _decoder(self) -> Decoder:  # created on demand: some numbers of channels have no decoder
        return make_decoder(self.decode, max(self.preprocessing.sides), self.preprocessing.channels, self.max_pixels)

    def _of_pixels(self, pixels: np.ndarray) -> torch.Tensor:
        return self._transform(torch.from_numpy(pixels).permute(2, 0, 1))
