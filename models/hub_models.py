"""Finds timm networks in any repository on the Hugging Face hub, named `timm:hf-hub:ORG/NAME` as in timm."""

from __future__ import annotations

import json
import re
from pathlib import Path

import timm
from huggingface_hub import hf_hub_download

from zerovision.models import HUB_PREFIX
from zerovision.models.timm_models import offline_where_unreachable, reason_of
from zerovision.training.base.errors import UserError, shown


def of_hub(model_type: str, weights: str = "", *, wants_weights: bool = True) -> tuple[str, str]:
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
