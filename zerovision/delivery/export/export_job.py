"""Contains the settings, network and check images of an export; also writes and opens the formats for PyTorch.

The formats for PyTorch are safetensors (named tensors) and torch.export (graph and tensors).
"""

from __future__ import annotations

import copy
import io
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from zerovision.delivery.evaluation_data import EvaluationData
from zerovision.delivery.export.output_folder import describe_use
from zerovision.delivery.export.pictures import EXAMPLE, FromPictures
from zerovision.delivery.settings import ExportSettings
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.errors import UserError
from zerovision.training.checkpoint.weights import load_model, save_weights
from zerovision.training.data.datasets import ImageDataset
from zerovision.training.data.reading.files import ImageError
from zerovision.training.tasks.labels import OneLabel

# Maps images, float32 [B, C, S, S], to logits, float32 [B, classes], both on the CPU; B may be any number.
Forward = Callable[[torch.Tensor], torch.Tensor]

MAX_BYTES = 2 * 10**9  # of float32 images to keep in memory
FACTS = "zerovision.json"  # stored with the graph inside a .pt2 file


@dataclass(frozen=True)
class CheckImages:
    """Real images of known classes, and the trained model's logits for them."""

    images: torch.Tensor  # float32 [N, C, S, S], preprocessed as in training
    labels: torch.Tensor  # int64 [N], indices of the model's classes
    logits: torch.Tensor  # float32 [N, classes], from the PyTorch module in fp32
    name: str  # of the data, such as "digits, val"
    task: OneLabel
    picture: Callable[[int], torch.Tensor] | None = None  # by index, decoded, uint8 [H, W, C]; None if not pictures

    def is_right(self, logits: torch.Tensor) -> torch.Tensor:
        """Return whether each image's highest logit in `logits`, [N, classes], belongs to a correct class, bool [N]."""
        return self.task.hits(logits.argmax(1, keepdim=True), self.labels)[:, 0]


@dataclass(frozen=True)
class ExportJob:
    """Everything that a format's writer needs to export a model; writers must not change `module`."""

    settings: ExportSettings
    module: nn.Module | FromPictures  # in float32 on the CPU and in evaluation mode
    metadata: dict[str, Any]  # the network's, from `zerovision.training.checkpoint.weights.load_model`
    origin: dict[str, Any]  # where the network came from, as JSON values
    check: CheckImages  # on which to compare the file with the module
    calibration: torch.Tensor | None  # from the training split, float32 [M, C, S, S]; None if the precision needs none

    def example(self) -> torch.Tensor:
        """Return two images to trace the network with; a batch size of 1 would become a constant."""
        preprocessing: Preprocessing = self.metadata["preprocessing"]
        if isinstance(self.module, FromPictures):
            return torch.zeros(*EXAMPLE, preprocessing.channels, dtype=torch.uint8)
        return torch.zeros(2, *preprocessing.shape)

    @property
    def free_sides(self) -> tuple[dict[int, Any]]:
        """The dynamic dimensions of the input, for torch.export."""
        names = ("batch", "height", "width") if isinstance(self.module, FromPictures) else ("batch",)
        return ({axis: torch.export.Dim(name) for axis, name in enumerate(names)},)

    def use(self) -> dict[str, Any]:
        """Return the instructions for using the file; see `describe_use`."""
        use = describe_use(self.metadata)
        return self.module.describe(use) if isinstance(self.module, FromPictures) else use


def run_in_batches(forward: Forward, images: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Return the logits, float32 [N, classes], of images [N, C, S, S]."""
    with torch.inference_mode():
        return torch.cat([forward(batch).float() for batch in images.split(batch_size)])


def load_check_images(data: EvaluationData, module: nn.Module, settings: ExportSettings) -> CheckImages:
    """Read validation images (evenly spaced ones if not all are used), and run the network on them.

    A UserError is raised if no image can be read, or if any cannot be read and bad images are not allowed.
    """
    dataset = data.datasets.val
    bytes_per_image = 4 * dataset.source.channels * math.prod(dataset.preprocessing.sides)
    images, indices = _read(dataset, settings.check_images or max(MAX_BYTES // bytes_per_image, 1))
    labels = data.label_map[dataset.source.labels[indices]]
    logits = run_in_batches(module, images, settings.batch_size)

    def picture(number: int) -> torch.Tensor:
        return dataset.source.read(indices[number]).permute(1, 2, 0).contiguous()

    return CheckImages(images, labels, logits, f"{data.data}, {data.split}", data.task, picture)


def load_calibration_images(data: EvaluationData, count: int) -> torch.Tensor:
    """Read images of the training split, evenly spaced and not augmented: float32 [count or fewer, C, S, S]."""
    train = data.datasets.train
    return _read(ImageDataset(train.source, data.datasets.val.preprocessing, most_bad=train.most_bad), count)[0]


def _read(dataset: ImageDataset, most: int) -> tuple[torch.Tensor, Sequence[int]]:
    chosen = np.linspace(0, len(dataset) - 1, min(most, len(dataset))).round().astype(int).tolist()
    images, indices = [], []
    for index in chosen:
        try:
            images.append(dataset[0, index][0])
            indices.append(index)
        except ImageError:
            if not dataset.most_bad:
                raise
    if not images:
        raise UserError(f"none of the {len(chosen)} images could be read, so the export cannot be checked.")
    return torch.stack(images), indices


@contextmanager
def tracing() -> Iterator[None]:
    """Disable gradients and PyTorch's warnings while the block traces a network; turn any error into a UserError."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # PyTorch's own deprecation warnings
        try:
            yield
        except Exception as error:  # torch.export and torch.onnx raise dozens of unrelated types
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UserError(f"PyTorch cannot trace this network: {reason}. Use --format safetensors.") from error


def is_large(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a matrix or a kernel; vectors are small, and rounding them loses more accuracy."""
    return tensor.is_floating_point() and tensor.ndim > 1


def write_safetensors(job: ExportJob, path: Path) -> None:
    """Write the tensors with zerovision's metadata; for bf16, biases and norms stay in fp32."""
    is_bf16, tensors = job.settings.precision == "bf16", job.module.state_dict()
    stored = {name: tensor.bfloat16() if is_bf16 and is_large(tensor) else tensor for name, tensor in tensors.items()}
    facts = {**job.metadata, "extra": {**job.metadata["extra"], "exported": job.origin}}
    try:
        save_weights(path, stored, **facts)
    except SafetensorError as error:  # safetensors raises this in place of an OSError
        raise OSError(str(error)) from error


def open_safetensors(path: Path, threads: int) -> Forward:
    """Load the file into an fp32 network, as users of the file would."""
    return load_model(path)[0]


class StoredInBf16(nn.Module):
    """A network whose large weights are stored in bf16 and converted to fp32 for each forward pass."""

    def __init__(self, module: nn.Module) -> None:
        """Copy the network, and convert its large weights to bf16."""
        super().__init__()
        self.inner = copy.deepcopy(module)
        for parameter in self.inner.parameters():
            if is_large(parameter):
                parameter.data = parameter.data.bfloat16()

    def forward(self, images: torch.Tensor) -> Any:
        """Map images `[B, C, S, S]` to logits `[B, classes]`, both float32; see `FromPictures` for pictures."""
        widened = {name: parameter.float() for name, parameter in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, widened, (images,))


def write_torch_export(job: ExportJob, path: Path) -> None:
    """Trace the network with a dynamic batch dimension (or raise a UserError), and write the traced program."""
    module = StoredInBf16(job.module) if job.settings.precision == "bf16" else job.module
    with tracing():
        program = torch.export.export(module, (job.example(),), dynamic_shapes=job.free_sides)
    stream = io.BytesIO()  # on a full disk, torch's own writer may raise errors other than OSError
    torch.export.save(program, stream, extra_files={FACTS: json.dumps({**job.use(), "origin": job.origin})})
    path.write_bytes(stream.getbuffer())


def open_torch_export(path: Path, threads: int) -> Forward:
    """Load the file as its users would; if the program has several outputs, only the first is returned."""
    program = torch.export.load(path).module()

    def forward(images: torch.Tensor) -> torch.Tensor:
        outputs = program(images)
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]

    return forward
