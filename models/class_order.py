"""Matches a network's outputs to classes by class name, never by the number of classes alone."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset

from zerovision.training.base.errors import shown

Names = Sequence[str]


def order_of(names: Names, known: Sequence[Names]) -> tuple[list[int], list[str]]:
    """Return the index of each class's output, and the classes that have no output or several outputs.

    Args:
        names: names of the classes, in the desired order.
        known: lists of the outputs' names, such as wnids and words; the list that matches the most classes is used.
    """
    found: list[tuple[list[int], list[str]]] = []
    for outputs in known:
        places: dict[str, list[int]] = {}
        for place, name in enumerate(outputs):
            places.setdefault(unicodedata.normalize("NFC", name), []).append(place)
        at = [places.get(unicodedata.normalize("NFC", name), []) for name in names]
        missing = [name for name, own in zip(names, at, strict=True) if len(own) != 1]
        found.append(([own[0] for own in at if len(own) == 1], missing))
    return min(found, key=lambda one: len(one[1]), default=([], list(names)))


def published_classes(config: Mapping[str, Any]) -> list[Names]:
    """Return lists of the output names of published weights; empty if the names are unknown.

    timm identifies ImageNet only by its number of classes. The 1,000 classes are listed by wnid, by all their words,
    and by the first word ("tench" of "tench, Tinca tinca").

    Args:
        config: timm's configuration, with num_classes, and label_names for other classes.
    """
    labels = config.get("label_names")
    if isinstance(labels, (list, tuple)) and all(isinstance(name, str) for name in labels):
        return [labels]
    if not (subset := infer_imagenet_subset(dict(config))):
        return []
    known = ImageNetInfo(subset)
    words = known.label_descriptions()
    return [known.label_names(), words, [text.partition(",")[0] for text in words]]


def classes_beside(path: str) -> list[Names]:
    """Return the output names in a config.json of timm or transformers next to a file; empty if there are none."""
    try:
        config = json.loads(Path(path).with_name("config.json").read_text(encoding="utf-8"))
        if labels := config.get("id2label"):
            return [[str(labels[str(place)]) for place in range(len(labels))]]
        return published_classes({"num_classes": config.get("num_classes"), "label_names": config.get("label_names")})
    except (OSError, ValueError, AttributeError, KeyError, TypeError):  # missing, or in another format
        return []


def head_by_name(
    head: Mapping[str, torch.Tensor], fresh: Mapping[str, torch.Tensor], names: Names, known: Sequence[Names]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return a trained classifier, `head`, for equally many classes of the data, and notes about it.

    A classifier with the same classes, by one of the lists of its outputs' names in `known`, is kept and reordered; one
    with other classes is replaced by `fresh`, which has random weights. Classes without names are assumed to be those
    of the data, in `names`.
    """
    known = [outputs for outputs in known if len(outputs) == len(names)]
    if not known:
        taken = f"the data's in their order, from {shown(names[0])} to {shown(names[-1])}"
        return {**head}, [f"head kept: its {len(names)} classes have no names and are taken for {taken}"]
    order, missing = order_of(names, known)
    if missing:
        why = f"its {len(names)} classes differ, such as {shown(known[0][0])}, the data's such as {shown(missing[0])}"
        return {**fresh}, [f"head replaced: {why}; it starts from random weights"]
    if order == sorted(order):
        return {**head}, []
    per_class = {key for key, tensor in head.items() if tensor.ndim and len(tensor) == len(names)}
    ordered = {key: tensor[order] if key in per_class else tensor for key, tensor in head.items()}
    return ordered, ["head reordered: its classes are those of the data, in another order"]
