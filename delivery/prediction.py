"""Labels images: from files of any size to the classes that a finished model takes them for."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import nn

from training.data.augment import evaluation_transform
from training.data.reading.file_sources import make_decoder
from training.data.reading.image_notes import collected_notes, noting
from training.data.reading.images import IMAGE_EXTENSIONS, MAX_FILE_BYTES, ImageError, open_image
from training.errors import UserError

STDIN = "-"
STDIN_NAME = "standard input"


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image.

    Attributes:
        image: the path as it was given.
        labels: the names of the most probable classes, the first one first.
        probabilities: theirs, in 0..1.
        note: what is odd about the image, in one line; mostly nothing.
    """

    image: str
    labels: list[str]
    probabilities: list[float]
    note: str = ""


def list_images(given: Sequence[str], stdin: bytes) -> Iterator[tuple[str, bytes | None]]:
    """Yield the path of each image, and its content where that came over standard input.

    Args:
        given: files, folders (searched to any depth, in order of their names; hidden files are left out), or "-".
        stdin: what "-" stands for: one image, or paths, one a line.

    Raises:
        UserError: A folder holds no image, or standard input nothing or more than `MAX_FILE_BYTES`.
    """
    for word in given:
        if word == STDIN:
            yield from _from_stdin(stdin)
        elif os.path.isdir(word):
            yield from ((path, None) for path in _below(word))
        else:
            yield word, None


def predict(
    images: Iterable[tuple[str, bytes | None]],
    module: nn.Module,
    metadata: dict[str, Any],
    *,
    device: torch.device,
    batch_size: int,
    top_k: int,
    flip: bool,
    decode: str,
) -> Iterator[Prediction | ImageError]:
    """Yield a prediction for each image, in order, or why it cannot be used.

    Args:
        images: of `list_images`.
        module: images float32 [B, 3, S, S] to logits [B, classes], in evaluation mode; it is moved to the device.
        metadata: what `training.checkpoint.weights.load_model` returned with it.
        device: where it runs.
        batch_size: images of one forward pass.
        top_k: how many classes each prediction names.
        flip: whether the mirrored image is asked too, and the mean of both probabilities told.
        decode: a name of `training.data.DECODERS`.
    """
    module.to(device)
    preprocessing, class_names = metadata["preprocessing"], metadata["class_names"]
    decoder = make_decoder(decode, preprocessing["image_size"])
    transform = evaluation_transform(preprocessing)

    def read(entry: tuple[str, bytes | None]) -> tuple[torch.Tensor, str] | ImageError:
        path, content = entry
        try:
            with collected_notes() as notes:
                pixels = decoder.read(path) if content is None else np.array(open_image(path, data=content))
        except ImageError as error:
            return error
        return transform(torch.from_numpy(pixels).permute(2, 0, 1)), notes.get(path, "")

    remaining = iter(images)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        while entries := list(islice(remaining, batch_size)):
            found = list(pool.map(read, entries))
            readable = [answer[0] for answer in found if not isinstance(answer, ImageError)]
            best = iter(_top_classes(module, torch.stack(readable).to(device), top_k, flip) if readable else [])
            for (path, _), answer in zip(entries, found, strict=True):
                if isinstance(answer, ImageError):
                    yield answer
                else:
                    shares, classes = next(best)
                    yield Prediction(path, [class_names[number] for number in classes], shares, answer[1])


@torch.inference_mode()
def _top_classes(
    module: nn.Module, images: torch.Tensor, top_k: int, flip: bool
) -> list[tuple[list[float], list[int]]]:
    """Return the highest probabilities of each image, and the numbers of their classes."""
    probabilities = module(images).float().softmax(1)
    if flip:
        probabilities = (probabilities + module(images.flip(3)).float().softmax(1)) / 2
    best = probabilities.topk(min(top_k, probabilities.shape[1]), dim=1)
    return list(zip(best.values.tolist(), best.indices.tolist(), strict=True))


def _from_stdin(content: bytes) -> Iterator[tuple[str, bytes | None]]:
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"standard input holds more than {MAX_FILE_BYTES / 1e6:g} MB: '-' reads one image, or paths.")
    try:
        with noting(STDIN_NAME), Image.open(io.BytesIO(content)):
            is_image = True
    except UnidentifiedImageError:
        is_image = False
    except Exception:  # Pillow's readers raise nearly anything on what only begins like an image
        is_image = True
    if is_image:
        yield STDIN_NAME, content
        return
    paths = [line for line in os.fsdecode(content).splitlines() if line]
    if not paths:
        raise UserError("standard input is empty: '-' reads one image, or paths, one a line.")
    yield from ((path, None) for path in paths)


def _below(folder: str) -> Iterator[str]:
    """Yield the images below a folder."""
    found = False
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and Path(name).suffix.lower() in IMAGE_EXTENSIONS:
                found = True
                yield os.path.join(parent, name)
    if not found:
        raise UserError(f"no image in the folder '{folder}': expected files with one of {', '.join(IMAGE_EXTENSIONS)}.")
