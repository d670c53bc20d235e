"""Builds any network of timm's registry, including zerovision's own, or of a repository on the Hugging Face hub."""

from __future__ import annotations

import difflib
import importlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import timm
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import get_session
from timm.layers import Conv2dSame, DropPath
from torch import nn

from zerovision.models import HUB_PREFIX, MODELS, ImageSize, model_spec, sides
from zerovision.models.dry_run import as_names
from zerovision.models.weights_metadata import Description
from zerovision.training.base.errors import UserError, nearest, shown

HUB_TIMEOUT_SECONDS = 5.0


class WholeInputConv2d(nn.Conv2d):
    """A convolution that is computed as a matrix product if its kernel is as large as its input.

    On a CPU, this takes a quarter of the time for VGG16's layer, which has 103 million weights.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map images `[B, C, H, W]` to `[B, out_channels, H', W']`, as the convolution does except for rounding."""
        if input.shape[2:] != self.kernel_size or self.padding != (0, 0) or self.groups != 1:
            return super().forward(input)
        order = (0, 1, 2, 3) if self.weight.is_contiguous() else (0, 2, 3, 1)  # the order of the weights, being large
        rows, weight = (tensor.permute(order).flatten(1) for tensor in (input, self.weight))
        return nn.functional.linear(rows, weight, self.bias)[:, :, None, None]


# Convolutions whose output is linear in their stored weight; other convolutions standardize the weight first.
PLAIN_CONVOLUTIONS = (nn.Conv2d, Conv2dSame, WholeInputConv2d)


def check_timm_name(name: str) -> None:
    """Accept a name in timm's registry, with or without a weights tag ("resnet18.a1_in1k").

    Raises:
        UserError: for any other name. The trainer replaces names that begin with `hf-hub:` before it calls this.
    """
    if not timm.is_model(name):
        # The message does not list all names, because timm has more than a thousand.
        of_hub = " Use the name of its architecture, with its file by --weights FILE." if ":" in name else ""
        hint = name_in_timm(name) or of_hub
        raise UserError(f"unknown model 'timm:{name}': timm {timm.__version__} has no such name.{hint}")
    architecture, _, tag = name.partition(".")
    tagged = timm.list_pretrained(f"{architecture}.*")
    if tag and name not in tagged:
        raise UserError(f"unknown weights tag '{tag}' in 'timm:{name}'. Allowed: {', '.join([architecture, *tagged])}.")


def name_in_timm(name: str, others: Iterable[str] = ()) -> str:
    """Return ' Did you mean ...?' with timm's name for a network in any spelling, or with one of `others`.

    Return '' if no name is similar.
    """
    # For hf-hub:timm/ResNet-50.a1_in1k, for example, `given` is 'ResNet-50', and `tag` is 'a1_in1k'.
    given, dot, tag = name.rpartition("/")[2].rpartition(":")[2].partition(".")
    letters = str.maketrans("", "", "-_ ")
    known = {name.translate(letters): name for name in timm.list_models(exclude_filters=[*MODELS])}
    found = known.get(given.lower().translate(letters), "")
    if not found:
        near = difflib.get_close_matches(given.lower(), known.values(), n=1, cutoff=0.75)
        return nearest(name, others) or (f" Did you mean 'timm:{near[0]}'?" if near else "")
    tagged = f"{found}{dot}{tag}"
    return f" Did you mean 'timm:{tagged if tagged in timm.list_pretrained(f'{found}.*') else found}'?"


def _registered(part: Description) -> str:
    """Return the name of a network in timm's registry; zerovision's own networks are added to the registry."""
    if module := model_spec(part.model_type).module:
        importlib.import_module(module)
    return part.timm_name or part.model_type


def check_rates(part: Description, rates: Mapping[str, float]) -> None:
    """Raise a UserError for a rate that the network cannot use, for lack of dropout or of residual blocks to skip."""
    name, model_type = _registered(part), part.model_type
    if rate := rates.get("drop_rate"):
        modules = _modules_with(name, drop_rate=rate)
        if rate not in (one.p if isinstance(one, nn.Dropout) else getattr(one, "drop_rate", 0.0) for one in modules):
            raise UserError(f"--dropout {rate}: model '{model_type}' does not support dropout: leave it out.")
    if rate := rates.get("drop_path_rate"):
        modules = _modules_with(name, drop_path_rate=rate)
        if not any(isinstance(one, DropPath) and one.drop_prob for one in modules):
            raise UserError(f"--drop-path {rate}: model '{model_type}' has no residual blocks to skip: leave it out.")


def _modules_with(name: str, **rate: Any) -> list[nn.Module]:
    """Return the modules of a network built with a rate, without data; empty if it does not accept the argument."""
    try:
        with torch.device("meta"):
            return [*timm.create_model(name, **rate).modules()]
    except TypeError:
        return []


def create(part: Description, *, pretrained: bool = False, rates: Mapping[str, float] = {}) -> nn.Module:
    """Build a network with the described head, as `timm.create_model` would.

    Networks with a fixed input size (vision transformers and the like) are built for the described image size, and
    pretrained weights are adapted to the described channels with timm's `adapt_input_conv`. A UserError is raised for
    an unknown name or tag, or if the pretrained weights are not available.

    `rates` are values of timm's `drop_rate` and `drop_path_rate`; by default, the network's own. `drop_rate` applies to
    the classifier's input and the network's other dropout layers. `drop_path_rate` is the probability of skipping the
    last residual block for an image; it decreases linearly toward the first block (Huang et al. 2016,
    https://arxiv.org/abs/1603.09382).
    """
    check_timm_name(timm_name := _registered(part))
    options = _options(part)
    # A rate of 0 is left out if the network does not accept the argument: there is nothing to turn off.
    options |= {name: rate for name, rate in rates.items() if rate or _modules_with(timm_name, **{name: rate})}
    if not pretrained:
        return timm.create_model(timm_name, **options)
    try:
        with offline_where_unreachable():
            return timm.create_model(timm_name, pretrained=True, **options)
    except Exception as error:  # the hub's clients raise a dozen types without a common base class
        reason = reason_of(error)
        if "size mismatch" in str(error):
            published: Any = timm.get_pretrained_cfg(timm_name)
            reason = (
                f"timm cannot adapt them to images of {part.image_size} pixels and {part.image_channels} channels; "
                f"they are for --image-size {published.input_size[-1]} --image-channels {published.input_size[0]}"
            )
        raise UserError(f"the pretrained weights of timm's {timm_name} could not be loaded: {reason}") from error


def published_config(name: str) -> dict[str, Any]:
    """Return timm's facts about the published weights of a network: their classes, normalization and sizes.

    Raises:
        UserError: for an unknown name or tag, or for a network without published weights.
    """
    check_timm_name(name)
    config: Any = timm.get_pretrained_cfg(name)
    if not (config and config.has_weights):
        raise UserError(f"timm has no published weights of {name}.")
    return config.to_dict()


def adapt_weights(part: Description, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adapt a network's whole state dict to `part`'s image size and channels; return another network's unchanged.

    As in timm, position embeddings are resampled, and a stem's weights are summed or repeated for other channels.
    """
    config: Any = timm.get_pretrained_cfg(timm_name := _registered(part))
    try:
        head, stem = (f"{as_names(name)[0]}.weight" for name in (config.classifier, config.first_conv))
        overlay = {
            "state_dict": tensors,
            "num_classes": len(tensors[head]),
            "input_size": (tensors[stem].shape[1], *config.input_size[1:]),
            "custom_load": False,
            "label_offset": 0,
        }
        options = _options(replace(part, num_classes=len(tensors[head])))
        return timm.create_model(timm_name, pretrained=True, pretrained_cfg_overlay=overlay, **options).state_dict()
    except Exception:  # tensors of another network may raise anything; the caller reports how they differ
        return tensors


def timm_size(timm_name: str | None, image_size: ImageSize) -> int | tuple[int, int] | None:
    """Return the `img_size` to build a network for; None if timm builds the network for all sizes."""
    config = timm.get_pretrained_cfg(timm_name) if timm_name else None
    if not (config and config.fixed_input_size):
        return None
    return sides(image_size) if isinstance(image_size, str) else image_size


def _options(part: Description) -> dict[str, Any]:
    timm_name = _registered(part)
    # timm's defaults are those of the published weights.
    options: dict[str, Any] = {"num_classes": part.num_classes, "in_chans": part.image_channels}
    if (img_size := timm_size(timm_name, part.image_size)) is not None:
        options["img_size"] = img_size
    if timm_name.startswith("vgg"):
        options["conv_layer"] = WholeInputConv2d
    return options


def reason_of(error: Exception) -> str:
    """Return why the hub's client failed, without a period."""
    if isinstance(error, LocalEntryNotFoundError):
        return f"{huggingface_hub.constants.ENDPOINT} cannot be reached, and the local cache has none"
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def offline_where_unreachable() -> AbstractContextManager[object]:
    """Use only the hub's local cache if the hub does not answer, because its client retries for nearly a minute."""
    constants = huggingface_hub.constants
    return mock.patch.object(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE or not _hub_answers())


def _hub_answers() -> bool:
    try:
        get_session().head(huggingface_hub.constants.ENDPOINT, timeout=HUB_TIMEOUT_SECONDS)
    except Exception:  # for whatever reason, the hub was not reached
        return False
    return True


def of_hub(model_type: str, weights: str, *, wants_weights: bool) -> tuple[str, str]:
    """Return a repository's network as `timm:<architecture>`, and its weights' local path, or '' if not requested.

    Missing files are downloaded into the hub's local cache; only safetensors are read.

    Args:
        model_type: `timm:hf-hub:ORG/NAME`, or `timm:hf-hub:ORG/NAME@REVISION`.
        weights: a file to load instead of the repository's weights, or ''.
        wants_weights: whether to load the repository's weights if `weights` is ''.

    Raises:
        UserError: if the repository cannot be reached, is not in timm's format, or has no model.safetensors.
    """
    repository, _, revision = model_type.removeprefix(HUB_PREFIX).partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository, re.ASCII):
        raise UserError(
            f"--model-type {shown(model_type)}: expected {HUB_PREFIX}ORG/NAME, such as {HUB_PREFIX}team/net."
        )
    loads_own = wants_weights and not weights
    names = ["config.json", "model.safetensors"] if loads_own else ["config.json"]
    for name in names:
        try:
            with offline_where_unreachable():
                found = hf_hub_download(repository, name, revision=revision or None)
            if name == "config.json":
                facts = json.loads(Path(found).read_text(encoding="utf-8"))
        except Exception as error:  # the hub's clients raise a dozen types without a common base class
            raise UserError(
                f"--model-type {model_type}: its {name} could not be read: {reason_of(error)}. Without it, or to "
                "resume a run, use timm's name of the network, timm:NAME, with --weights FILE for a new run."
            ) from error
    network = facts.get("architecture") if isinstance(facts, dict) else None
    if not isinstance(network, str) or not timm.is_model(network) or facts.get("model_args"):
        what = "takes model_args" if network and facts.get("model_args") else "names no timm network"
        raise UserError(f"--model-type {model_type}: its config.json {what}: use timm:NAME and --weights FILE.")
    return f"timm:{network}", found if loads_own else weights
