"""timm's own train.py on our data and model: `python -m benchmarks.peers.timm_script SCRIPT DATA.npz ITS FLAGS...`.

The script is run as it is. Two things are put in place before: our networks are registered under their names, without
what only our trainer does (no whitened stem), and its data set is the arrays of the file, in memory, so that it need
not decode files.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import timm.data
import timm.models
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from zerovision.models import MODELS
from zerovision.models.build import build_model
from zerovision.training.base.settings import RunSettings


class Images(Dataset):
    """Pillow images and labels of one part of a .npz file, as timm's `ImageDataset` gives them."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Keep the arrays: uint8 [N, H, W] or [N, H, W, 3], and labels [N]."""
        self.images, self.labels, self.transform = images, labels, None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(self.images[index]).convert("RGB")
        return (self.transform(image) if self.transform else image), int(self.labels[index])


def register(name: str, image_size: int) -> None:
    """Put one of our networks into timm's registry, as it is for images of this size."""

    def create(pretrained: bool = False, num_classes: int = 10, **_: Any) -> nn.Module:
        module = build_model(RunSettings(model_type=name), num_classes, image_size).module
        module.num_classes = num_classes  # type: ignore[assignment]  # train.py reads it
        return module

    create.__name__ = name
    create.__module__ = "timm.models.ours"
    timm.models.register_model(create)


def main(script: str, file: str, flags: list[str]) -> None:
    """Run the script with the data of the file."""
    arrays = np.load(file)
    image_size = int(flags[flags.index("--img-size") + 1])
    sys.modules["timm.models.ours"] = sys.modules[__name__]
    for name, spec in MODELS.items():
        if spec.timm_name is None and not spec.takes_members:
            register(name, image_size)

    def create_dataset(*_: Any, is_training: bool, **__: Any) -> Images:
        part = "train" if is_training else "test"
        return Images(arrays[f"x_{part}"], arrays[f"y_{part}"])

    timm.data.create_dataset = create_dataset
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
