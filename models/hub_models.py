"""Networks of timm's in any repository of the Hugging Face hub: `timm:hf-hub:ORG/NAME`, as timm itself names them."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import hf_hub_download

from models.errors import UserError
from models.timm_models import check_timm_name, offline_where_unreachable, reason_of

PREFIX = "timm:hf-hub:"


def of_hub(model_type: str) -> tuple[str, str]:
    """Return the network of a repository as `timm:<architecture>`, and the local path of its weights.

    Both files are fetched into the hub's local cache if they are not there; only safetensors are read.

    Args:
        model_type: `timm:hf-hub:ORG/NAME`, or `timm:hf-hub:ORG/NAME@REVISION`.

    Raises:
        UserError: if the repository cannot be reached, is not of timm's form, or has no model.safetensors.
    """
    repository, _, revision = model_type.removeprefix(PREFIX).partition("@")
    try:
        with offline_where_unreachable():
            config, weights = (
                hf_hub_download(repository, name, revision=revision or None)
                for name in ("config.json", "model.safetensors")
            )
        facts = json.loads(Path(config).read_text(encoding="utf-8"))
    except Exception as error:  # the hub's clients raise a dozen types with no common base
        raise UserError(f"--model-type {model_type}: {reason_of(error)}.") from error
    if "architecture" not in facts or facts.get("model_args"):
        what = "makes its network with model_args" if facts.get("model_args") else "names no architecture of timm's"
        raise UserError(
            f"--model-type {model_type}: its config.json {what}: give timm:ARCHITECTURE and --weights FILE."
        )
    check_timm_name(facts["architecture"])
    return f"timm:{facts['architecture']}", weights
