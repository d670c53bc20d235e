"""Defines the table of networks, which `zerovision.models.build` builds, and the sizes of their images.

Importing this module loads neither torch nor timm, because the command line reads the table for `--help`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zerovision.training.base.errors import UserError, check_name

TIMM_PREFIX = "timm:"
HUB_PREFIX = f"{TIMM_PREFIX}hf-hub:"  # for a repository on the Hugging Face hub; see `zerovision.models.timm_models`
LARGEST_IMAGE_SIZE = 4096  # pixels
MOST_IMAGE_CHANNELS = 1024
MOST_MEMBERS = 32  # of an ensemble
USUAL_RATE = 1e-3  # of AdamW


@dataclass(frozen=True)
class ModelSpec:
    """An entry of `MODELS`.

    Attributes:
        summary: Short description of the network.
        timm_name: The network's name in timm, if it is one of timm's own.
        module: The module that registers the network with timm under the model's name, if it is not one of timm's own.
            An ensemble has no module, because `zerovision.models.build` builds it from its members.
        always_pretrained: Whether the model requires pretrained weights, from the hub or from `--weights FILE`.
        learning_rate: Default peak learning rate of AdamW when training from random weights; see docs/dev/models.md.
        takes_members: Whether the network consists of other models in `MODELS`.
        whitens_stem: Whether the first convolution whitens the training images if training starts from random weights.
    """

    summary: str
    timm_name: str | None = None
    module: str = ""
    always_pretrained: bool = False
    learning_rate: float = USUAL_RATE
    takes_members: bool = False
    whitens_stem: bool = False


MODELS: dict[str, ModelSpec] = {
    "basic_cnn": ModelSpec("small plain CNN: a baseline that trains in seconds", module="zerovision.models.basic_cnn"),
    "airbench": ModelSpec(
        "airbench's CNN, which trains fast on small images", module="zerovision.models.airbench", whitens_stem=True
    ),
    "airbench_small": ModelSpec(
        "airbench's CNN at half its width",
        module="zerovision.models.airbench",
        whitens_stem=True,
        learning_rate=3e-3,
    ),
    "mobilenet": ModelSpec("MobileNetV3-Small", timm_name="mobilenetv3_small_100", learning_rate=3e-3),
    "mobilenet_finetuned": ModelSpec(
        "MobileNetV3-Small from pretrained weights with a new head",
        timm_name="mobilenetv3_small_100",
        always_pretrained=True,
    ),
    "efficientnet": ModelSpec("EfficientNet-B0", timm_name="efficientnet_b0", learning_rate=3e-3),
    "vgg": ModelSpec("VGG16 with BatchNorm", timm_name="vgg16_bn"),
    "cnn_lstm": ModelSpec(
        "CNN features read column by column by a bidirectional LSTM",
        module="zerovision.models.cnn_lstm",
        learning_rate=5e-4,
    ),
    "ensemble": ModelSpec("several models trained side by side, their probabilities averaged", takes_members=True),
}


def hub_name_of(weights: str) -> str:
    """Return `timm:hf-hub:ORG/NAME@REVISION` for a file in the hub's local cache; '' for any other file."""
    found = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/([^/]+)/model\.safetensors$", weights)
    return f"{HUB_PREFIX}{found[1]}/{found[2]}@{found[3]}" if found else ""


def check_model_name(name: str) -> None:
    """Accept a name in `MODELS` or `timm:<name>`; `build_model` checks whether timm has that name.

    Raises:
        UserError: for any other name; the message suggests the nearest name.
    """
    of_hub = re.sub(r"^(timm:)?hf[-_]?hub:/*", HUB_PREFIX, name, flags=re.IGNORECASE)
    if of_hub.startswith(HUB_PREFIX) and of_hub != name:
        raise UserError(f"model '{name}': to use a network from the Hugging Face hub, write {of_hub}.")
    if name not in MODELS and name.removeprefix(TIMM_PREFIX) in (name, "", *MODELS):
        from zerovision.models.timm_models import name_in_timm  # imported late, only for a wrong name

        check_name("model", name, [*MODELS, f"{TIMM_PREFIX}<name>"], name_in_timm(name, MODELS))


def model_spec(name: str) -> ModelSpec:
    """Return the entry of `MODELS` for `name`, or a new entry for `timm:<name>`."""
    check_model_name(name)
    if name in MODELS:
        return MODELS[name]
    timm_name = name.removeprefix(TIMM_PREFIX)
    rates = {spec.timm_name: spec.learning_rate for spec in MODELS.values() if not spec.always_pretrained}
    rate = rates.get(timm_name.partition(".")[0], USUAL_RATE)
    return ModelSpec(f"timm's {timm_name}", timm_name=timm_name, learning_rate=rate)


ImageSize = int | str
"""The side of square images in pixels, such as 224; 'HEIGHTxWIDTH' for other images, such as '224x448'."""

_SIDES = re.compile(r"[1-9][0-9]{0,8}x[1-9][0-9]{0,8}")


def sides(size: ImageSize) -> tuple[int, int]:
    """Return height and width in pixels."""
    height, _, width = str(size).partition("x")
    return int(height), int(width or height)


def size_of(height: int, width: int) -> ImageSize:
    """Return the image size for a height and a width in pixels."""
    return height if height == width else f"{height}x{width}"


def read_size(word: str) -> ImageSize:
    """Parse a size that a user typed.

    Raises:
        ValueError: if `word` is not a size.
    """
    return size_of(*sides(word)) if _SIDES.fullmatch(word) else int(word)
