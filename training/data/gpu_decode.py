"""Decoding on the GPU: workers read the bytes of files, nvJPEG decodes a batch of them at once.

Plain JPEG files go to the GPU as they are; all else is decoded in the workers, as by `--decode exact`. Cropping and
resizing follow on the device, image by image.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torchvision.io import ImageReadMode, decode_jpeg

from training.data.bundle import ImageDataset
from training.data.decode import END_OF_IMAGE, jpeg_header
from training.data.images import ImageError, open_image
from training.data.reader import Batch
from training.data.transfer import to_device
from training.errors import UserError


def read_encoded(dataset: ImageDataset, epoch: int, index: int, draws: list[float]) -> torch.Tensor:
    """Return the bytes of a plain JPEG file, uint8 [n], else what `ImageDataset.read` gives, uint8 [3, S, S].

    Raises:
        ImageError: The file cannot be read.
    """
    path = dataset.source.name(index)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ImageError(path, str(error)) from None
    header = jpeg_header(data)
    if header is None or header.orientation != 1 or not data.endswith(END_OF_IMAGE):
        return dataset.read(epoch, index, draws)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode_batch(batch: Batch, dataset: ImageDataset, device: torch.device) -> Batch:
    """Decode what `read_encoded` left: `images` becomes uint8 [B, 3, S, S] on `device`.

    Raises:
        UserError: nvJPEG cannot decode a file of the batch.
    """
    files = [image for image in batch.encoded if image.ndim == 1]
    try:
        decoded = iter(decode_jpeg(files, mode=ImageReadMode.RGB, device=device) if files else [])
    except RuntimeError as error:
        raise _broken(batch, dataset, error) from None
    draws = dataset.draws(batch.epoch, batch.indices.numpy())
    images = [
        dataset.from_pixels(next(decoded), numbers) if image.ndim == 1 else to_device(image, device)
        for image, numbers in zip(batch.encoded, draws, strict=True)
    ]
    return dataclasses.replace(batch, images=torch.stack(images), encoded=[])


def _broken(batch: Batch, dataset: ImageDataset, error: RuntimeError) -> UserError:
    """Find the file that no decoder reads, else blame nvJPEG."""
    for index in batch.indices.tolist():
        try:
            open_image(dataset.source.name(index))
        except ImageError as found:
            return found
    return UserError(f"--decode gpu: {' '.join(str(error).split())}. Train with --decode cpu.")
