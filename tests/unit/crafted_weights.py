"""Weights files whose metadata was crafted, and the memory that reading them took."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from zerovision.models.weights_metadata import METADATA_KEY


def craft_metadata(file: Path, change: Any) -> None:
    """Replace what a weights file says of itself.

    Args:
        file: of `zerovision.training.checkpoint.weights.save_weights`.
        change: the new text, the new content, or a dict of some entries by name ("preprocessing.std") and value;
            "tensor" is the name of a tensor that is put in.
    """
    tensors = load_file(file)
    with safe_open(file, framework="pt") as reader:
        facts = json.loads(reader.metadata()[METADATA_KEY])
    if isinstance(change, dict):
        for name, value in change.items():
            *parents, last = name.split(".")
            entry = facts
            for parent in parents:
                entry = entry[parent]
            entry[last] = value
        if "tensor" in change:
            tensors[facts.pop("tensor")] = torch.zeros(1)
    text = change if isinstance(change, str) else json.dumps(facts if isinstance(change, dict) else change)
    save_file(tensors, file, metadata={METADATA_KEY: text})


def peak_bytes() -> int:
    """Return the most memory that this process has ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
