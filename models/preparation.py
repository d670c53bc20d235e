"""Finds the preprocessing of the weights that a run starts or learns from, in timm or a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from zerovision.models import ImageSize, model_spec, sides, size_of
from zerovision.models.weights_metadata import Preprocessing, open_weights, read_facts
from zerovision.training.base.errors import UserError

FITS = {"center": "crop", "squash": "squash", "border": "pad"}  # our `fit` by timm's `crop_mode`


class Preparation(NamedTuple):
    """The preprocessing for a network; a field is None if it does not matter.

    Attributes:
        mean: Mean per channel of pixels in 0..1.
        std: Standard deviation per channel of pixels in 0..1.
        interpolation: Name of the filter.
        fit: crop, squash or pad.
        crop: Share of the shorter side that is kept, if `fit` is crop.
        image_size: Size of the images, in pixels.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str | None
    fit: str | None
    crop: float | None
    image_size: ImageSize | None

    @classmethod
    def of_run(cls, preprocessing: Preprocessing) -> Preparation:
        """Return the preprocessing of a run's images."""
        size, resized = preprocessing.image_size, preprocessing.resize_size
        fit = preprocessing.fit or ("squash" if resized is None else "crop")
        crop = None if fit != "crop" or resized is None else crop_share(size, resized)
        return cls(preprocessing.mean, preprocessing.std, preprocessing.interpolation, fit, crop, size)

    @classmethod
    def of_timm(cls, published: Mapping[str, Any]) -> Preparation:
        """Return the preprocessing in timm's `pretrained_cfg`, with timm's defaults.

        Raises:
            ValueError, KeyError, TypeError: if `published` is invalid.
        """
        mean, std = (tuple(map(float, published[name])) for name in ("mean", "std"))
        fit = FITS.get(published.get("crop_mode") or "center")
        crop = float(published.get("crop_pct") or 0.875) if fit == "crop" else None
        shape = published.get("input_size")
        size = size_of(*shape[-2:]) if shape else None
        return cls(mean, std, published.get("interpolation") or "bicubic", fit, crop, size)


def crop_share(size: ImageSize, resized: ImageSize) -> float:
    """Return the share of the shorter side that a center crop keeps, rounded so that it yields the resized side."""
    side, whole = (min(sides(each)) for each in (size, resized))
    share = side / whole
    return share if math.floor(side / share) == whole else math.nextafter(share, 0)


def differences(there: Preparation, here: Preparation, *, of_arrays: bool) -> str:
    """Return how the preprocessing differs between the run and the weights, with the flags that change it, or ''.

    Args:
        there: preprocessing of the weights; a field that is None matches any preprocessing of the run.
        here: preprocessing of the run.
        of_arrays: whether the run's images are arrays of a fixed size, which are used whole.
    """
    if of_arrays:
        there = there._replace(fit=None, crop=None, image_size=None)
    side = min(sides(here.image_size or 0))
    resized = {int(side / each.crop) for each in (there, here) if each.crop}
    lines = {
        "resized by {0.interpolation}, here by {1.interpolation} (--interpolation)": (
            there.interpolation and there.interpolation != here.interpolation
        ),
        "fitted by {0.fit}, here by {1.fit} (--fit)": there.fit and there.fit != here.fit,
        "cut to {0.crop:.3g} of the shorter side, here to {1.crop:.3g} (--eval-crop)": (
            there.crop and here.crop and len(resized) > 1
        ),
        "of {0.image_size} pixels, here of {1.image_size} (--image-size)": (
            there.image_size and there.image_size != here.image_size
        ),
    }
    return ", ".join(line.format(there, here) for line, is_other in lines.items() if is_other)


def starting_preparations(
    model_type: str, members: Sequence[str], *, pretrained: bool, weights: str
) -> list[Preparation]:
    """Return the preprocessing of each of the starting weights: an empty list for random weights.

    Args:
        model_type: a name in `MODELS`, or `timm:<name>`.
        members: names of an ensemble's members.
        pretrained: whether the hub's weights are loaded.
        weights: the local file to load, or ''; a file from a run of zerovision contains its preprocessing.

    Raises:
        UserError: if the members' published weights expect different normalizations.
    """
    if weights and (own := _of_file(weights)):
        return [own]
    names = members if model_spec(model_type).takes_members else (model_type,)
    published = [name for name in names if weights or pretrained or model_spec(name).always_pretrained]
    found = list(dict.fromkeys(one for name in published if (one := _published(name))))
    if len({(one.mean, one.std) for one in found}) > 1:
        if weights:
            return []
        raise UserError(
            f"--model-type ensemble:{','.join(names)}: their published weights were trained with pixels normalized in "
            "different ways: use members that agree, or leave --pretrained out."
        )
    return found


def _of_file(path: str) -> Preparation | None:
    if not os.path.isfile(path):
        return None
    try:
        with open_weights(path) as reader:
            return Preparation.of_run(read_facts(reader)["preprocessing"])
    except (SafetensorError, OSError, ValueError, KeyError):  # not from zerovision; `weights_file` reports broken files
        pass
    try:  # a hub repository in timm's format
        facts = json.loads(Path(path).with_name("config.json").read_text(encoding="utf-8"))
        return Preparation.of_timm(facts["pretrained_cfg"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _published(model_type: str) -> Preparation | None:
    from timm.models import get_pretrained_cfg

    timm_name = model_spec(model_type).timm_name
    config = get_pretrained_cfg(timm_name) if timm_name else None
    return None if config is None else Preparation.of_timm(config.to_dict())
