"""Decoding on the GPU: workers read the bytes of files, nvJPEG decodes a batch of them in one call.

Only plain JPEG files are decoded there; other files are decoded in the workers, as by `--decode exact`. Cropping and
resizing follow on the device, image by image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from simplejpeg import encode_jpeg
from torchvision.io import ImageReadMode, decode_jpeg

from training.data.bad_images import read_or_replace
from training.data.datasets import ImageDataset
from training.data.reading.decode import jpeg_header
from training.data.reading.images import read_file
from training.data.transfer import to_device
from training.errors import UserError

if TYPE_CHECKING:
    from training.data.reader import Batch


def read_encoded(dataset: ImageDataset, epoch: int, index: int, draws: list[float], offset: int) -> torch.Tensor:
    """Return the bytes of a plain JPEG file, uint8 [n]; of other files what `ImageDataset.read` returns.

    Raises:
        ImageError: The file cannot be read.
    """
    path = dataset.source.name(index)
    data = read_file(path)
    header = jpeg_header(data, path)
    if header is None or not header.is_plain:
        return dataset.read(epoch, index, draws, offset)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode_batch(batch: Batch, dataset: ImageDataset, device: torch.device) -> Batch:
    """Decode the files of `read_encoded`: `images` becomes uint8 [B, 3, S, S] on `device`.

    A file that nvJPEG refuses is decoded by the CPU, with a note; if that fails too, it is a bad image as any other.

    Raises:
        ImageError: Neither decoder reads a file, and none may be unreadable.
        UserError: nvJPEG does not work here at all, or too many consecutive images cannot be read.
    """
    dataset = dataset.for_epoch(batch.epoch)
    decoded = _decode_files([image for image in batch.encoded if image.ndim == 1], device)
    draws = dataset.draws(batch.epoch, batch.draw_keys)
    bad_slots, bad_images, notes = [], dict(batch.bad_images), dict(batch.notes)
    images: list[torch.Tensor] = []
    for slot, (image, index) in enumerate(zip(batch.encoded, batch.indices.tolist(), strict=True)):
        pixels = next(decoded) if image.ndim == 1 else None
        if isinstance(pixels, torch.Tensor):
            image = dataset.from_pixels(pixels, draws[slot])
        elif pixels is not None:
            image, error = read_or_replace(partial(dataset.read, batch.epoch, draws=draws[slot]), index, dataset)
            if error is None:
                notes[dataset.source.name(index)] = f"decoded by the CPU, because the GPU refuses it: {pixels}"
            else:
                bad_images[error.path] = error.reason
                bad_slots.append(slot)
        images.append(to_device(image, device))
    weights = batch.weights.index_fill(0, torch.tensor(bad_slots), 0) if bad_slots else batch.weights
    return dataclasses.replace(
        batch, images=torch.stack(images), weights=weights, bad_images=bad_images, notes=notes, encoded=[]
    )


def _decode_files(files: list[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor | str]:
    """Yield the pixels of each file, uint8 [3, H, W], or the reason if the device refuses it.

    Raises:
        UserError: It refuses a plain JPEG that was encoded here, too.
    """
    if not files:
        return
    if device.type == "cuda":
        # nvJPEG writes on a stream of its own, which waits for nothing, into memory that this stream may still be
        # reading for the batch before: PyTorch reuses at once what was freed on the same stream.
        torch.cuda.current_stream(device).synchronize()
    try:
        yield from decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
        return
    except RuntimeError as error:  # one refused file fails the whole call
        first_error = error
    one_by_one = [_decode_file(file, device) for file in files]
    if all(isinstance(answer, str) for answer in one_by_one):
        plain = encode_jpeg(np.zeros((16, 16, 3), dtype=np.uint8))
        if isinstance(_decode_file(torch.frombuffer(bytearray(plain), dtype=torch.uint8), device), str):
            message = " ".join(str(first_error).split())
            raise UserError(f"--decode gpu: {message}. Train with --decode cpu.") from None
    yield from one_by_one


def _decode_file(file: torch.Tensor, device: torch.device) -> torch.Tensor | str:
    try:
        return decode_jpeg([file], mode=ImageReadMode.RGB, device=device)[0]
    except RuntimeError as error:
        return " ".join(str(error).split())
