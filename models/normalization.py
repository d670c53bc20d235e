"""The mean and standard deviation that pretrained weights were trained with: fine-tuning keeps them."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from models import DEFAULT_MEMBERS, model_spec
from models.weights_metadata import open_weights, read_facts

Normalization = tuple[tuple[float, ...], tuple[float, ...]]


def starting_normalization(model_type: str, *, pretrained: bool, weights: str) -> Normalization | None:
    """Return (mean, std) per channel, for pixels in 0..1, that the starting weights expect; None for random weights.

    Args:
        model_type: a name of `MODELS`, or `timm:<name>`.
        pretrained: whether the hub's weights are loaded.
        weights: the local file that is loaded, or ''; one of our own runs says what it was trained with.
    """
    if weights:
        return _from_our_file(weights) or _from_timm(model_type)
    if pretrained or model_spec(model_type).always_pretrained:
        return _from_timm(model_type)
    return None


def _from_our_file(path: str) -> Normalization | None:
    # A file that is missing or broken is reported where its tensors are read.
    if not Path(path).is_file():
        return None
    try:
        with open_weights(path) as reader:
            preprocessing = read_facts(reader)["preprocessing"]
        return tuple(preprocessing["mean"]), tuple(preprocessing["std"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return None


def _from_timm(model_type: str) -> Normalization | None:
    from timm.models import get_pretrained_cfg

    spec = model_spec(model_type)
    # The members that an ensemble has by default were all trained with the same numbers.
    timm_name = model_spec(DEFAULT_MEMBERS[0]).timm_name if spec.takes_members else spec.timm_name
    config = get_pretrained_cfg(timm_name) if timm_name else None
    return (tuple(config.mean), tuple(config.std)) if config is not None else None
