"""Nothing of a batch waits on its way to a GPU: shown on a pretended one, whose tensors have shapes alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.data import DataOptions
from zerovision.training.data.augmentations import AUGMENTATIONS, Augmentation
from zerovision.training.data.batch_transforms import BatchTransforms, Mixing, to_device
from zerovision.training.tasks.labels import OneLabel

BATCH, SIZE = 4, 8
GPU = torch.device("cuda", 0)


class Copies(TorchDispatchMode):
    """Notes of each copy to the GPU whether it can run beside the host."""

    def __init__(self, pinned):
        super().__init__()
        self.pinned, self.can_run_beside = pinned, []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        named = named or {}
        if function is torch.ops.aten._to_copy.default:
            source, target = arguments[0], named.get("device")
            if source.device.type == "cpu" and target is not None and target.type == "cuda":
                is_pinned = any(source is tensor for tensor in self.pinned)
                self.can_run_beside.append(is_pinned and named.get("non_blocking", False))
        return function(*arguments, **named)


@pytest.fixture
def copies(monkeypatch):
    """What is copied to a pretended GPU inside this test."""
    pinned = []

    def pin(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: any(tensor is other for other in pinned))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    with FakeTensorMode(allow_non_fake_inputs=True), Copies(pinned) as noted:
        yield noted


ALL_IN_BATCHES = Augmentation(shift=True, shift_padding="reflect", mirror="alternate", erasing=1.0)


@pytest.mark.parametrize(
    "augmentation", [*AUGMENTATIONS.values(), ALL_IN_BATCHES], ids=[*AUGMENTATIONS, "all in batches"]
)
@pytest.mark.parametrize("is_there", [True, False], ids=["set on the GPU", "batch from the loader"])
def test_a_batch_is_finished_without_a_wait(copies, augmentation, is_there):
    transforms = BatchTransforms(Preprocessing(SIZE, None, (0.5,) * 3, (0.5,) * 3), augmentation, seed=0)
    images = torch.empty(BATCH, 3, SIZE, SIZE, dtype=torch.uint8, device=GPU, memory_format=torch.channels_last)
    if is_there and augmentation.in_batches:
        bordered = transforms.with_border(images.permute(0, 2, 3, 1))
        finished = transforms.from_set(bordered, np.arange(BATCH), 0, np.arange(BATCH))
    else:
        finished = transforms(images, 0, np.arange(BATCH))
    assert (finished.device, finished.shape) == (GPU, (BATCH, 3, SIZE, SIZE))
    assert len(copies.can_run_beside) >= 2, "the factors of the normalisation at least"
    assert all(copies.can_run_beside)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_a_batch_is_mixed_without_a_wait(copies, kind):
    images = torch.empty(BATCH, 3, SIZE, SIZE, device=GPU, memory_format=torch.channels_last)
    mixing = Mixing(DataOptions(**{kind: 1.0}), 5)
    mixed, targets = mixing(images, torch.empty(BATCH, dtype=torch.int64, device=GPU), np.ones(BATCH), 0, 0)
    assert (mixed.shape, targets.shape, targets.device) == (images.shape, (BATCH, 5), GPU)
    assert copies.can_run_beside == [True]


def test_an_evaluation_does_not_wait_for_its_indices(copies):
    logits, labels = torch.empty(BATCH, 6, device=GPU), torch.arange(BATCH)
    OneLabel(6).recorder().add(logits, to_device(labels, GPU), torch.ones(BATCH, device=GPU), torch.arange(BATCH))
    assert copies.can_run_beside == [True, True]


def test_on_a_cpu_nothing_is_copied():
    values = torch.arange(3)
    assert to_device(values, torch.device("cpu")) is values
