"""Chooses the settings for `train DATA` by fixed rules, and gives a reason for each."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from zerovision.models import HUB_PREFIX, TIMM_PREFIX, model_spec
from zerovision.training.base.settings import FEWEST_IMAGES
from zerovision.training.base.units import plural
from zerovision.training.config.global_batch import MOST_IMAGES_ON_CPU, usual_global_batch
from zerovision.training.data.augmentations import MIN_IMAGE_SIZE
from zerovision.training.data.settings import IMBALANCE

EFFORTS = ("seconds", "minutes", "hours", "best")
MINUTES = dict(zip(EFFORTS, (1, 15, 240, 0), strict=True))  # time limits; 0 means no limit
UPDATES = dict(zip(EFFORTS, (500, 2000, 20_000, 80_000), strict=True))  # when training from random weights
OF_FINE_TUNING = 0.2  # fraction of these updates when fine-tuning
OF_A_LIMIT = 4  # times as many updates if the user limits the minutes: the limit then ends the run
FEWEST_OF_AN_UPDATE = 32  # images, if an epoch has several updates: an update with fewer images takes just as long
FEWEST_UPDATES = 4
FEWEST_EPOCHS, MOST_EPOCHS = 3, 200  # with more epochs, a small data set is memorized
SMALL = 64  # pixels: images whose shorter side is at most this long suit one of our own networks
TINY = 16  # pixels: smaller images do not fit those networks
FEW = 5000  # images: with fewer, a head is fitted to its optimum within seconds
MINUTES_OF_A_HEAD = 5  # a shorter run is better spent on training the whole network
HELD_OUT = (0.2, 1000, 0.1)  # share to hold out below a number of images, that number, share above it
MOST_BAD = "skip:0.05"

# By effort, on CPU cores and on GPUs: networks to train from random weights, and their image sizes in pixels.
OURS = (("airbench_small", "airbench_small", "airbench", "airbench"), ("airbench",) * 4)
SCRATCH = (
    (("airbench_small", 64), ("airbench_small", 64), ("airbench", 96), ("timm:resnet50", 224)),
    (("airbench", 64), ("timm:resnet18", 128), ("timm:resnet50", 192), ("timm:resnet50", 224)),
)
# By effort, on CPU cores and on GPUs: networks to use for photographs if their published weights are available.
VIT_SMALL, VIT_BASE = "timm:vit_small_patch16_dinov3.lvd1689m", "timm:vit_base_patch16_dinov3.lvd1689m"
PUBLISHED = (
    ("timm:mobilenetv3_large_100.ra_in1k", "timm:resnet18.a1_in1k", VIT_SMALL, VIT_SMALL),
    (VIT_SMALL, VIT_SMALL, VIT_BASE, VIT_BASE),
)
# Update rules. A learning rate is for the given number of images per update, and scales with that number's square root.
MUON = {"optimizer": "muon", "optimizer_options": "ns_steps=3", "fallback_optimizer": "adamw:0.2", "weight_decay": 0.1}
ADAMW = {"optimizer": "adamw", "weight_decay": 0.05}
RULES: tuple[tuple[str, bool, dict[str, Any], int], ...] = (  # networks, whether from published weights, rule, images
    (r"airbench", False, MUON | {"learning_rate": 0.04, "lookahead": 6}, 64),
    (r"(timm:)?resnet", False, MUON | {"learning_rate": 0.02}, 64),
    (r"", False, ADAMW, 256),
    (r"", True, ADAMW | {"learning_rate": 1e-4}, 64),
)
HEAD = {
    **{"tune": "head", "features": "cached", "solver": "lbfgs", "weight_decay": 0.001, "label_smoothing": 0},
    "augmentation": "none",
}
FAST_IN_BF16 = re.compile(r"airbench|timm:(resnet|vit|convnext)")  # depthwise convolutions are half as fast in bf16

Choices = dict[str, tuple[Any, str]]


@dataclass(frozen=True)
class Published:
    """Weights to start a network from: their image size in pixels, license and location."""

    network: str
    image_size: int
    licence: str = ""
    where: str = ""
    is_there: bool = True


@dataclass(frozen=True)
class Facts:
    """The facts on which the choices depend.

    Attributes:
        images: number of images to train on, including those to hold out if `has_val` is false.
        classes: number of classes; 0 if images have several labels.
        rarest: number of images in the smallest class.
        commonest: number of images in the largest class.
        side: the images' shorter side in pixels; 0 if unknown.
        is_files: whether the images are files that must be decoded.
        has_val: whether there is a validation part.
        ranks: number of ranks that read different images.
        has_gpus: whether each rank has a GPU.
        has_bf16: whether the processor supports bf16.
        published: pretrained weights of the given network, or of the network to choose; None if it has none.
    """

    images: int
    classes: int
    rarest: int
    commonest: int
    side: int
    is_files: bool = True
    has_val: bool = False
    ranks: int = 1
    has_gpus: bool = False
    has_bf16: bool = False
    published: Published | None = None


def values_of(choices: Choices) -> dict[str, Any]:
    """Return the settings without the reasons."""
    return {name: value for name, (value, _) in choices.items()}


def choose(facts: Facts, given: Mapping[str, Any], effort: str) -> Choices:
    """Choose the settings that the user did not specify; return them by name, each with a reason.

    Args:
        facts: facts about the data and the machine.
        given: the user's settings, to which the choices adapt.
        effort: one of `EFFORTS`.
    """
    made: Choices = {}

    def take(reason: str, **settings: Any) -> None:
        made.update({name: (value, reason) for name, value in settings.items() if name not in given})

    has_weights = _take_network(facts, given, effort, take)
    network = str((values_of(made) | {**given})["model_type"])
    is_head = has_weights and effort == "seconds" and not given.get("weights")
    if facts.is_files:
        take("unreadable files are skipped and counted", bad_images=MOST_BAD)
    if facts.is_files and given.get("decode", "cpu") == "cpu":  # other decoders have no cache
        take("decoded once, on disk", cache="disk")
    share, folds = HELD_OUT[0] if facts.images < HELD_OUT[1] else HELD_OUT[2], given.get("folds")
    if not facts.has_val and not folds:
        take(f"the {facts.images} images have no validation split", val_fraction=share)
    held_out = 0 if facts.has_val else 1 / folds if folds else given.get("val_fraction", share)
    images = max(1, round(facts.images * (1 - held_out)))
    if given.get("augmentation", "auto") == "auto" and facts.is_files and not is_head:
        if not _is_photographs(facts):
            take(
                f"images of {plural(facts.side, 'pixel')} are shifted and mirrored, not cropped",
                **{"augmentation": "shift_flip", "shift_pixels": 2, "shift_padding": "reflect", "mirror": "alternate"},
            )
        elif given.get("fit", "auto") in ("auto", "crop"):
            take("crops with most of the image, mirrored", augmentation="crop_flip", crop_scale="0.35,1")
    if facts.rarest * IMBALANCE <= facts.commonest and facts.classes and not is_head:
        take(f"the rarest class has {facts.rarest} images, the most common {facts.commonest}", class_weights="balanced")
    if facts.has_bf16 and not facts.has_gpus and FAST_IN_BF16.match(network):
        take("this processor computes it at twice the speed of fp32", precision="bf16")
    total = _take_batch(facts, given, images, take)
    if is_head:
        take("for --effort seconds: only the head, fitted to its exact optimum", **HEAD)
    else:
        _take_epochs(given, effort, (images, total, has_weights), take)
        _take_rule(given, network, (total, has_weights), take)
    return made


def _take_network(facts: Facts, given: Mapping[str, Any], effort: str, take: Any) -> bool:
    """Choose the network and its image size; return whether it starts from trained weights."""
    found, rung = facts.published, EFFORTS.index(effort)
    if found and found.is_there and (given.get("weights") or given.get("pretrained") or _is_photographs(facts)):
        licence = f", license {found.licence}" if found.licence else ""
        take(f"trained weights, {found.where}{licence}", model_type=found.network)
        if not given.get("weights"):
            take("pretrained weights need fewer images", pretrained=True)
        take("as the weights expect", image_size=found.image_size)
        return True
    if _is_photographs(facts):
        network, size = SCRATCH[facts.has_gpus][rung]
        why = f"from random weights, at --effort {effort} on {'GPUs' if facts.has_gpus else 'CPU cores'}"
        if found:
            why += f"; {found.network} has pretrained weights, which are not available here and would help far more"
        take(why, model_type=network, **({} if "model_type" in given else {"image_size": size}))
    else:
        take("small images", model_type="basic_cnn" if facts.side < TINY else OURS[facts.has_gpus][rung])
        why = "their own size" if facts.side >= MIN_IMAGE_SIZE else "the smallest size that is allowed"
        take(why, **({"image_size": max(facts.side, MIN_IMAGE_SIZE)} if facts.is_files or facts.side < TINY else {}))
    return bool(given.get("pretrained") or given.get("weights")) or str(given.get("model_type")).startswith(HUB_PREFIX)


def _is_photographs(facts: Facts) -> bool:
    return not 0 < facts.side <= SMALL


def _take_batch(facts: Facts, given: Mapping[str, Any], images: int, take: Any) -> int:
    """Choose and return the number of images per update, so that an epoch has several updates."""
    at_once = facts.ranks * given.get("gradient_accumulation_steps", 1)  # micro-batches per update
    unit = FEWEST_IMAGES * at_once
    least = min(FEWEST_OF_AN_UPDATE, images // FEWEST_UPDATES) // unit * unit
    total = max(least, usual_global_batch(at_once, images))
    total = total if facts.has_gpus else min(total, MOST_IMAGES_ON_CPU * at_once)
    batch = given.get("batch_size", "auto" if facts.has_gpus and at_once == facts.ranks else total // at_once)
    if given.get("global_batch"):
        return int(given["global_batch"])
    if batch == "auto":
        take(f"the most that fit, {total} per update", batch_size="auto", global_batch=total)
        return total
    take(f"{plural(math.ceil(images / (batch * at_once)), 'update')} per epoch", batch_size=batch)
    return int(batch * at_once)


def _take_epochs(given: Mapping[str, Any], effort: str, about: tuple[int, int, bool], take: Any) -> None:
    """Choose the number of epochs from the number of updates, and the limit in minutes."""
    images, total, has_weights = about
    steps, has_limit = math.ceil(images / total), bool(given.get("minutes"))
    updates = UPDATES[effort] * (OF_FINE_TUNING if has_weights else 1) * (OF_A_LIMIT if has_limit else 1)
    epochs = min(MOST_EPOCHS, max(FEWEST_EPOCHS, math.ceil(updates / steps)))
    take(f"{epochs * steps} updates of {total} images{', if the minutes allow them' * has_limit}", epochs=epochs)
    if MINUTES[effort] and "epochs" not in given and given.get("features") != "cached":
        take(f"--effort {effort}: fewer epochs on a slow machine", minutes=MINUTES[effort])


def _take_rule(given: Mapping[str, Any], network: str, about: tuple[int, bool], take: Any) -> None:
    """Choose the update rule, learning rate and schedule, unless the user names a rule or a preset."""
    total, has_weights = about
    if {"optimizer", "preset"} & given.keys():
        return
    is_published = has_weights and not given.get("weights")
    _, _, rule, images = next(line for line in RULES if line[1] == is_published and re.match(line[0], network))
    peak = rule.get("learning_rate", model_spec(network).learning_rate)
    rate = float(f"{peak * math.sqrt(total / images):.2g}")
    start = "published" if is_published else "random" if not has_weights else "your"
    take(f"from a table for {network.removeprefix(TIMM_PREFIX)} with {start} weights", **rule | {"learning_rate": rate})
    if "epochs" in given:
        take("falls from the first epoch to the last", schedule="linear")
    else:
        take("stable until the last fifth: --resume with more --epochs continues there", schedule="wsd:auto:linear")


def has_head_first(facts: Facts, values: Mapping[str, Any], given: Collection[str]) -> bool:
    """Return whether to fit the head to its optimum before training the whole network, which suits few images."""
    starts = bool(values.get("pretrained") or values.get("weights"))
    is_whole = values.get("tune", "full") == "full" and not {"tune", "features", "preset"} & {*given}
    has_plain_head = not str(values["model_type"]).startswith("airbench")  # airbench scales the output of its head
    has_time = not 0 < float(values.get("minutes", 0)) < MINUTES_OF_A_HEAD
    return starts and is_whole and has_plain_head and has_time and bool(facts.classes) and facts.images < FEW


def of_head(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the run that fits the head."""
    left = {
        *("epochs", "minutes", "class_weights", "lookahead", "ema", "learning_rate", "schedule"),
        *("optimizer", "optimizer_options", "fallback_optimizer", "mixup", "cutmix"),
        *("crop_scale", "shift_pixels", "shift_padding", "mirror"),
    }
    return {name: value for name, value in values.items() if name not in left} | HEAD
