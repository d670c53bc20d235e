"""What is exported, and what the export is checked with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

# From images float32 [B, 3, S, S] to logits float32 [B, classes], both on the CPU; B is free.
Run = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class CheckImages:
    """Real images with known classes, and what the trained model says of them.

    Attributes:
        images: float32 [N, 3, S, S], prepared as the model was trained.
        labels: int64 [N], classes of the model.
        logits: float32 [N, classes], of the PyTorch module in fp32.
        name: what they are, such as "digits, val".
    """

    images: torch.Tensor
    labels: torch.Tensor
    logits: torch.Tensor
    name: str

    def __len__(self) -> int:
        return len(self.labels)

    def top1(self, logits: torch.Tensor) -> float:
        """Return the share of images, 0 to 1, whose highest logit [N, classes] is their class."""
        return float((logits.argmax(1) == self.labels).double().mean())


@dataclass(frozen=True)
class ExportJob:
    """One export.

    Attributes:
        module: the network, float32 on the CPU in evaluation mode; writers leave it as it is.
        metadata: what `training.checkpoint.weights.load_model` returned with it.
        origin: where it came from, as JSON can hold it.
        precision: a name of `PRECISIONS`.
        check: images that the file is judged on.
        calibration: float32 [M, 3, S, S] from the training split, None where the precision needs none.
        batch_size: images of one run of the file.
        max_accuracy_loss: points of top-1, 0 to 100, that the file may lose.
        threads: of onnxruntime.
        tell: takes one line on what is going on.
    """

    module: nn.Module
    metadata: dict[str, Any]
    origin: dict[str, Any]
    precision: str
    check: CheckImages
    calibration: torch.Tensor | None
    batch_size: int
    max_accuracy_loss: float
    threads: int
    tell: Callable[[str], None]

    def example(self) -> torch.Tensor:
        """Return images [2, 3, S, S] to trace the network with: a batch of 1 would be taken for a constant."""
        size = self.metadata["preprocessing"]["image_size"]
        return torch.zeros(2, 3, size, size)


@dataclass(frozen=True)
class Written:
    """What a writer did; all of it empty where the precision has no choices to make.

    Attributes:
        fp32: the same model in fp32 in the same format, to compare with.
        calibration: how the ranges of activations were found.
        layers: how many layers could be quantized.
        left_in_fp32: those that compute in fp32, by the network's names.
        all_stored: whether the weights of those are stored in int8 all the same.
    """

    fp32: Path | None = None
    calibration: str = ""
    layers: int = 0
    left_in_fp32: tuple[str, ...] = ()
    all_stored: bool = False


def run_in_batches(run: Run, images: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Return the logits, float32 [N, classes], of images [N, 3, S, S]."""
    with torch.inference_mode():
        return torch.cat([run(batch).float() for batch in images.split(batch_size)])
