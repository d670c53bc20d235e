"""Which output of a network stands for which class: by the names of the classes, never by their number alone."""

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
    """Return at which output each of these classes is, and which of them are at none, or at several.

    Args:
        names: of the classes, in the order that is wanted.
        known: lists of the outputs' names, such as wnids and words, of which that with the most of the classes counts.
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
    """Return what the outputs of published weights are called, none if nobody says.

    timm names those of ImageNet by their number alone: its 1,000 classes have wnids, all their words and the first of
    these ("tench" of "tench, Tinca tinca").

    Args:
        config: of timm's, with num_classes, and label_names if they are others.
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
    """Return what the outputs of a file are called by the config.json of a hub's repository beside it, if there is one.

    That is in timm's form, with label_names, or in that of transformers, with id2label.
    """
    try:
        config = json.loads(Path(path).with_name("config.json").read_text(encoding="utf-8"))
        if labels := config.get("id2label"):
            return [[str(labels[str(place)]) for place in range(len(labels))]]
        return published_classes({"num_classes": config.get("num_classes"), "label_names": config.get("label_names")})
    except (OSError, ValueError, AttributeError, KeyError, TypeError):  # none, or of another form
        return []


def head_by_name(
    head: Mapping[str, torch.Tensor], fresh: Mapping[str, torch.Tensor], names: Names, known: Sequence[Names]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return a trained classifier for the classes of the data, and notes about it.

    It stays if it has these classes, put into their order. If it has others it starts from random weights; if they have
    no names they are taken for those of the data.

    Args:
        head: its tensors, with as many outputs as there are names.
        fresh: the same with random weights.
        names: of the data's classes.
        known: lists of the outputs' names.
    """
    known = [outputs for outputs in known if len(outputs) == len(names)]
    if not known:
        taken = f"the data's in their order, from {shown(names[0])} to {shown(names[-1])}"
        return {**head}, [f"head kept: its {len(names)} classes have no names, they are taken for {taken}"]
    order, missing = order_of(names, known)
    if missing:
        why = (
            f"its {len(names)} classes are others, such as {shown(known[0][0])}, the data's such as {shown(missing[0])}"
        )
        return {**fresh}, [f"head replaced: {why}; it starts from random weights"]
    if order == sorted(order):
        return {**head}, []
    per_class = {key for key, tensor in head.items() if tensor.ndim and len(tensor) == len(names)}
    ordered = {key: tensor[order] if key in per_class else tensor for key, tensor in head.items()}
    return ordered, ["head put in order: its classes are those of the data, in another order"]
