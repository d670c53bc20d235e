"""What the tests of exports share: a small trained run, and the guide's lines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from tests.kit import ROOT, new_model, save_built
from zerovision.training.data import DataOptions, load_data

IMAGE_SIZE = 16
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md"))]


def lines_of(words: str) -> str:
    """Return the only Python block of the pages that contains all of these words."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if all(word in block for word in words.split())]
    return found


def train_on_digits(epochs: int = 3):
    """Train basic_cnn in plain PyTorch: above 95 % in seconds."""
    torch.manual_seed(0)
    data = load_data(DataOptions(image_size=IMAGE_SIZE, augmentation="none"))
    built = new_model("basic_cnn", num_classes=10, image_size=IMAGE_SIZE)
    images = torch.stack([data.train[0, index][0] for index in range(len(data.train))])
    steps = epochs * (len(images) // 64)
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=0.004)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    order = torch.cat([torch.randperm(len(images)) for _ in range(epochs)])
    for batch in order.split(64)[:steps]:
        loss = torch.nn.functional.cross_entropy(built.module(images[batch]), data.train.source.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return built, data


def save_run(folder: Path, built, data, **config) -> Path:
    """Write what a run leaves: its weights and its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"model_type": built.description.model_type, "image_size": IMAGE_SIZE, **config}
    (folder / "config.json").write_text(json.dumps(values))
    save_built(
        folder / "model.safetensors",
        built,
        class_names=data.class_names,
        preprocessing=data.preprocessing,
        extra={"epoch": 3, "top1": 0.95},
    )
    return folder


def save_new_run(folder: Path, data, **config) -> Path:
    """Write what a run of basic_cnn leaves, with random weights."""
    torch.manual_seed(0)
    size = data.preprocessing.image_size
    built = new_model("basic_cnn", num_classes=len(data.class_names), image_size=size)
    return save_run(folder, built, data, image_size=size, **config)


def held_out(data) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all validation images and their labels."""
    return torch.stack([data.val[0, index][0] for index in range(len(data.val))]), data.val.source.labels
