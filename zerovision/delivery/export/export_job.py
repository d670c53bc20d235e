"""One export: its settings, the network, and the images to compare its file on; also PyTorch's own formats.

PyTorch's formats are safetensors (named tensors) and torch.export (graph and tensors).
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

# From images float32 [B, C, S, S] to logits float32 [B, classes], both on the CPU; B is free.
Forward = Callable[[torch.Tensor], torch.Tensor]

MAX_BYTES = 2 * 10**9  # of the images that are kept in memory, float32
FACTS = "zerovision.json"  # beside the graph, inside a .pt2 file


@dataclass(frozen=True)
class CheckImages:
    """Real images of known classes, and the trained model's logits for them.

    Attributes:
        images: float32 [N, C, S, S], prepared as the model was trained.
        labels: int64 [N], classes of the model.
        logits: float32 [N, classes], of the PyTorch module in fp32.
        name: name of the data, such as "digits, val".
        task: see `zerovision.delivery.evaluation_data.EvaluationData`.
        picture: returns the decoded picture at a position, uint8 [H, W, C]; None if the images are not pictures.
    """

    images: torch.Tensor
    labels: torch.Tensor
    logits: torch.Tensor
    name: str
    task: OneLabel
    picture: Callable[[int], torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def is_right(self, logits: torch.Tensor) -> torch.Tensor:
        """Return whether the highest logit [N, classes] of each image is its class, or one of its classes: bool [N]."""
        return self.task.hits(logits.argmax(1, keepdim=True), self.labels)[:, 0]


@dataclass(frozen=True)
class ExportJob:
    """What a format's writer gets.

    Attributes:
        settings: the user's settings.
        module: the network, or a module that contains it and its preprocessing, float32 on the CPU in evaluation mode;
            writers must not change it.
        metadata: what `zerovision.training.checkpoint.weights.load_model` returned with it.
        origin: where it came from, as JSON values.
        check: images that the file is compared on.
        calibration: float32 [M, C, S, S] from the training split, None if the precision needs none.
    """

    settings: ExportSettings
    module: nn.Module | FromPictures
    metadata: dict[str, Any]
    origin: dict[str, Any]
    check: CheckImages
    calibration: torch.Tensor | None

    def example(self) -> torch.Tensor:
        """Return images [2, C, H, W] to trace the network with; a batch of 1 would become a constant."""
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
        """Return how the file is used; see `describe_use`."""
        use = describe_use(self.metadata)
        return self.module.describe(use) if isinstance(self.module, FromPictures) else use


def run_in_batches(forward: Forward, images: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Return the logits, float32 [N, classes], of images [N, C, S, S]."""
    with torch.inference_mode():
        return torch.cat([forward(batch).float() for batch in images.split(batch_size)])


def load_check_images(data: EvaluationData, module: nn.Module, settings: ExportSettings) -> CheckImages:
    """Read validation images, evenly spaced if not all are used, and run the network on them.

    Raises:
        UserError: if an image cannot be read, or none remains.
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
    """Read images of the training split, evenly spaced and not augmented: float32 [count or fewer, C, S, S].

    Raises:
        UserError: see `load_check_images`.
    """
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
        raise UserError(f"none of {len(chosen)} images could be read, but an export must be checked.")
    return torch.stack(images), indices


@contextmanager
def tracing() -> Iterator[None]:
    """Trace a network within this block: without gradients and PyTorch's warnings.

    Raises:
        UserError: instead of any error of the tracer.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # PyTorch's own deprecations
        try:
            yield
        except Exception as error:  # torch.export and torch.onnx raise dozens of types with no common base
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UserError(f"PyTorch cannot trace this network: {reason}. Give --format safetensors.") from error


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a matrix or a kernel; vectors (biases, norms) are small, and rounding them costs more."""
    return tensor.is_floating_point() and tensor.ndim > 1


def write_safetensors(job: ExportJob, path: Path) -> None:
    """Write the tensors with our metadata; with bf16, biases and norms stay in fp32."""
    is_bf16, tensors = job.settings.precision == "bf16", job.module.state_dict()
    stored = {name: tensor.bfloat16() if is_bf16 and is_large(tensor) else tensor for name, tensor in tensors.items()}
    facts = {**job.metadata, "extra": {**job.metadata["extra"], "exported": job.origin}}
    try:
        save_weights(path, stored, **facts)
    except SafetensorError as error:  # which its writer raises in place of the system's errors
        raise OSError(str(error)) from error


def open_safetensors(path: Path, threads: int) -> Forward:
    """Load the file into a network in fp32, as its users do."""
    return load_model(path)[0]


class StoredInBf16(nn.Module):
    """A network whose large weights are stored in bf16 and widened to fp32 for use."""

    def __init__(self, module: nn.Module) -> None:
        """Take a copy of the network."""
        super().__init__()
        self.inner = copy.deepcopy(module)
        for parameter in self.inner.parameters():
            if is_large(parameter):
                parameter.data = parameter.data.bfloat16()

    def forward(self, images: torch.Tensor) -> Any:
        """Map images `[B, C, S, S]` to logits `[B, classes]`, both float32; or see `FromPictures`."""
        widened = {name: parameter.float() for name, parameter in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, widened, (images,))


def write_torch_export(job: ExportJob, path: Path) -> None:
    """Trace the network with a dynamic batch dimension and write it.

    Raises:
        UserError: if PyTorch cannot trace it.
    """
    module = StoredInBf16(job.module) if job.settings.precision == "bf16" else job.module
    with tracing():
        program = torch.export.export(module, (job.example(),), dynamic_shapes=job.free_sides)
    facts = {**job.use(), "origin": job.origin}
    stream = io.BytesIO()  # on a full disk a file object raises OSError, torch's own writer anything
    torch.export.save(program, stream, extra_files={FACTS: json.dumps(facts)})
    path.write_bytes(stream.getbuffer())


def open_torch_export(path: Path, threads: int) -> Forward:
    """Load the file as its users do; if it has several outputs, the first is returned."""
    program = torch.export.load(path).module()

    def forward(images: torch.Tensor) -> torch.Tensor:
        outputs = program(images)
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]

    return forward
