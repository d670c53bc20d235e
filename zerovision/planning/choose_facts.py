"""Collects the facts for `planning.choose`: data, machine, and available pretrained weights."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from zerovision.models import MODELS, TIMM_PREFIX
from zerovision.models.sides import sides
from zerovision.models.weights_metadata import open_weights, read_facts
from zerovision.planning.choose import Facts, Published, wanted_network
from zerovision.training.base.run_folder import as_typed
from zerovision.training.config import TrainConfig
from zerovision.training.data import data_options, list_images, load_data
from zerovision.training.data.parts import PARTS, TRAIN, VAL

SAMPLE = 32  # number of images whose sizes are read
HUB_SECONDS = 2.0
PROCESSOR = Path("/proc/cpuinfo")
BF16 = ("avx512_bf16", "amx_bf16", "bf16")


def gather(given: Mapping[str, Any], effort: str, gpus: int) -> Facts:
    """Return the facts about the user's data and machine.

    Raises:
        UserError: for data that cannot be read.
    """
    config = TrainConfig(**{name: value for name, value in given.items() if name not in ("weights", "pretrained")})
    options = data_options(config)
    images = list_images(options)
    if images is None:
        pair = load_data(options)
        parts: list[str] = [*pair.parts]
        counts = np.array(pair.train_counts)
        side = min(pair.train.source.read(0).shape[-2:])
    else:
        in_train = images["part"] == PARTS.index(TRAIN)
        parts = [PARTS[number] for number in np.unique(images["part"])]
        counts = np.unique(images["label"][in_train], return_counts=True)[1]
        side = _usual_side(images, np.flatnonzero(in_train))
    return Facts(
        images=int(counts.sum()),
        classes=0 if options.reads_lists else len(counts),
        rarest=int(min(counts, default=0)),
        commonest=int(max(counts, default=0)),
        side=side,
        is_files=images is not None,
        has_val=images is None or VAL in parts,
        gpus=gpus,
        has_bf16=_has_bf16(),
        published=_weights(given, effort, has_gpus=gpus > 0, is_small=images is None),
    )


def _usual_side(images: Any, rows: np.ndarray) -> int:
    """Return the median of some images' shorter sides, or 0 if no image can be read."""
    found = []
    for row in rows[np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(int)]:
        with contextlib.suppress(Exception), Image.open(io.BytesIO(images.content(int(row)))) as image:
            found.append(min(image.size))
    return int(statistics.median(found)) if found else 0


def _has_bf16() -> bool:
    with contextlib.suppress(OSError):
        words = {*PROCESSOR.read_text(errors="replace").split()}
        return bool(words & {*BF16})
    return False


def _weights(given: Mapping[str, Any], effort: str, *, has_gpus: bool, is_small: bool) -> Published | None:
    """Return the pretrained weights of the given network, or of the network to be chosen; None if it has none."""
    if file := given.get("weights"):
        with contextlib.suppress(Exception), open_weights(os.path.expanduser(file)) as reader:  # not a file of ours
            facts = read_facts(reader)
            size = min(sides(facts["preprocessing"].image_size))
            return Published(facts["description"].model_type, size, where=as_typed(f"of {file}"))
        return None
    name = str(given.get("model_type", wanted_network(effort, has_gpus=has_gpus)))
    if is_small or given.get("pretrained") is False:
        return None
    import timm
    from timm.models import get_pretrained_cfg

    timm_name = MODELS[name].timm_name if name in MODELS else name.removeprefix(TIMM_PREFIX)
    config: Any = get_pretrained_cfg(timm_name) if timm_name and timm.is_model(timm_name) else None
    if not (config and config.has_weights):
        return None
    where = _where(config.hf_hub_id)
    licence = config.license or ""
    return Published(name, config.input_size[-1], licence, where, is_there=bool(where) or bool(given.get("pretrained")))


def _where(repository: str | None) -> str:
    """Return a phrase that locates the hub's weights; '' if they are neither cached nor quickly reachable."""
    import huggingface_hub
    from huggingface_hub.utils import get_session

    if not repository:
        return ""
    for file in ("model.safetensors", "pytorch_model.bin"):
        if isinstance(huggingface_hub.try_to_load_from_cache(repository, file), str):
            return "in the hub's cache"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return ""
    address = f"{huggingface_hub.constants.ENDPOINT}/{repository}/resolve/main/config.json"
    pool = concurrent.futures.ThreadPoolExecutor(1)
    with contextlib.suppress(Exception):  # the hub may fail to answer in time for any reason
        answer = pool.submit(lambda: get_session().head(address, timeout=HUB_SECONDS)).result(HUB_SECONDS)
        if answer.status_code < 400:
            return f"downloaded from {huggingface_hub.constants.ENDPOINT}"
    pool.shutdown(wait=False)
    return ""
