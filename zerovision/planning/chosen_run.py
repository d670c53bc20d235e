"""The run that `zerovision train DATA` or `zerovision.train(data)` starts: facts, given settings, chosen settings."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import os
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from zerovision.models import MODELS, TIMM_PREFIX, sides
from zerovision.models.weights_metadata import open_weights, read_facts
from zerovision.planning.choose import (
    EFFORTS,
    MINUTES,
    PUBLISHED,
    Choices,
    Facts,
    Published,
    choose,
    has_head_first,
    of_head,
    values_of,
)
from zerovision.training.base.errors import UserError, check_name
from zerovision.training.base.plugins import load_plugins
from zerovision.training.base.run_folder import CHOICE, RunFolder, as_typed
from zerovision.training.config import FLAG_OF, WORDS, TrainConfig
from zerovision.training.config.check import check_launched
from zerovision.training.config.command_line import settled
from zerovision.training.config.file import read_preset
from zerovision.training.config.saved import saved_settings
from zerovision.training.config.values import launch_command, word_of
from zerovision.training.data import data_options, list_images, load_data
from zerovision.training.data.parts import PARTS, TRAIN, VAL
from zerovision.training.data.reading.decode import header_size
from zerovision.training.data.reading.files import is_array
from zerovision.training.observe.new_run import named_after_data, refuse_existing, run_folder
from zerovision.training.world.launchers import data_ranks

LEAST_MINUTES = 0.1  # the time limit of a stage that starts when no time is left
SAMPLE = 32  # number of images whose sizes are read
HUB_SECONDS = 2.0
PROCESSOR = Path("/proc/cpuinfo")
BF16 = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True)
class ChosenRun:
    """One run, or two runs, the first of which trains only the head."""

    stages: Sequence[TrainConfig]  # the settings of each run; the last run is the requested one
    choices: Choices = field(default_factory=dict)  # settings and their reasons; empty for a resumed run
    lines: Sequence[str] = ()  # messages about the choices, and the command that repeats them
    began: float = field(default_factory=time.time)  # when the time limit started to run, in seconds since 1970

    @property
    def config(self) -> TrainConfig:
        """The settings of the requested run."""
        return self.stages[-1]

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return run_folder(self.config)

    def train(self, train: Callable[[TrainConfig], int]) -> int:
        """Print the choices, and train; return the exit code.

        Args:
            train: function that trains with a configuration and returns the exit code.
        """
        try:
            if self.lines:
                print("\n".join(self.lines), flush=True)
            return next((code for stage in self.stages if (code := train(self._in_time(stage)))), 0)
        finally:
            with contextlib.suppress(OSError):
                self.folder.path.rmdir()  # fails unless the folder is empty
            if self.lines and self.folder.path.is_dir():
                with contextlib.suppress(OSError):
                    (self.folder.path / CHOICE).write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def _in_time(self, stage: TrainConfig) -> TrainConfig:
        """Return the stage's settings, with the remaining minutes as the time limit."""
        if not stage.minutes or stage.solver == "lbfgs":
            return stage
        left = stage.minutes - (time.time() - self.began) / 60
        return replace(stage, minutes=round(max(left, LEAST_MINUTES), 2))


def choose_run(
    given: Mapping[str, Any], effort: str, ranks: tuple[int, int], label_of: Mapping[str, str], *, is_launched: bool
) -> ChosenRun:
    """Return the run for the given settings, with its own folder; a resumed run keeps its settings.

    Args:
        given: the user's settings by field, including the data.
        effort: one of `EFFORTS`; '' to derive it from the minutes.
        ranks: number of ranks, and number of ranks with a GPU.
        label_of: see `check_config`.
        is_launched: whether a launcher starts the ranks; it may choose the strategy.

    Raises:
        UserError: for a wrong setting, and for data that cannot be read.
    """
    began, values = time.time(), {**given}
    if values.get("plugin"):
        values["plugin"] = load_plugins(values["plugin"])
    preset = read_preset(values.get("preset", ""))
    resume = values.get("resume", "never")
    if resume in ("auto", "must") and not values.get("run_name"):
        raise UserError(f"{label_of['resume']} {resume} continues a run: add {label_of['run_name']}.")
    if saved_settings(values):
        return ChosenRun([settled(values, preset, label_of, is_launched=is_launched)], began=began)
    if effort:
        check_name("effort", effort, EFFORTS)

    if values["data"].startswith("hf:"):
        values.setdefault("download", True)  # the user requests it by naming such data
    asked = {**preset, **values}
    if not effort:  # the one that fits the time that the user allows
        minutes = asked.get("minutes") or MINUTES["minutes"]
        effort = next((each for each in EFFORTS if minutes <= MINUTES[each]), EFFORTS[-2])
    facts = gather(asked, effort, *ranks)
    choices = choose(facts, asked, effort)
    config = settled({**values_of(choices), **values}, preset, label_of, is_launched=is_launched)
    heads = [TrainConfig(**of_head(vars(config)))] if has_head_first(facts, vars(config), asked.keys()) else []
    heads = [check_launched(head, FLAG_OF) for head in heads]
    stages = [config := named_after_data(config)]  # creates a folder, and therefore comes after all checks
    for head in heads:
        stages = with_head(replace(head, run_name=f"{config.run_name}-head"), config)
    for stage in stages:
        refuse_existing(stage, run_folder(stage))
    return ChosenRun(stages, choices, describe(facts, choices, stages, ranks[0]), began)


def with_head(head: TrainConfig, config: TrainConfig) -> list[TrainConfig]:
    """Return the settings of a run that trains only the head, and of a full run that starts from its weights."""
    return [head, replace(config, weights=str(run_folder(head).weights), pretrained=False)]


def describe(facts: Any, choices: Choices, stages: Sequence[TrainConfig], ranks: int) -> list[str]:
    """Return the choices with reasons, and the launcher commands that repeat them."""
    of_reason: dict[str, list[str]] = {}
    values = vars(TrainConfig()) | values_of(choices)
    for name in (name for name in choices if name in WORDS):
        of_reason.setdefault(choices[name][1], []).append(f"{FLAG_OF[name][2:]} {word_of(values, name)}")
    lines = [f"{facts.images} images, {facts.classes or 'lists of'} classes; run {stages[-1].run_name}"]
    lines += [f"  {', '.join(settings)}: {reason}" for reason, settings in of_reason.items()]
    name = f"{stages[-1].run_name}-again"
    repeated = [replace(stages[-1], run_name=name)]
    if len(stages) > 1:
        lines.append("  first only the head, to its exact optimum, then all layers: few images, trained weights")
        repeated = with_head(replace(stages[0], run_name=f"{name}-head"), repeated[0])
    commands = [shlex.join(launch_command(stage, ranks, ranks)) for stage in repeated]
    return [*lines, "to repeat it: " + " && \\\n  ".join(commands)]


def gather(given: Mapping[str, Any], effort: str, ranks: int, gpus: int) -> Facts:
    """Return the facts about the user's data and machine, or raise a UserError if the data cannot be read."""
    config = TrainConfig(**{name: value for name, value in given.items() if name not in ("weights", "pretrained")})
    options = data_options(config)
    images = list_images(options)
    if images is None:
        pair = load_data(options)
        counts = np.array(pair.train_counts)
        side = min(pair.train.source.read(0).shape[-2:])
    else:
        in_train = images["part"] == PARTS.index(TRAIN)
        counts = np.unique(images["label"][in_train], return_counts=True)[1]
        side = _usual_side(images, np.flatnonzero(in_train))
    return Facts(
        images=int(counts.sum()),
        classes=0 if options.reads_lists else len(counts),
        rarest=int(min(counts, default=0)),
        commonest=int(max(counts, default=0)),
        side=side,
        is_files=images is not None,
        has_val=images is None or PARTS.index(VAL) in images["part"],
        ranks=data_ranks(ranks, config.mesh),
        has_gpus=gpus > 0,
        has_bf16=_has_bf16(),
        published=_weights(given, effort, has_gpus=gpus > 0, is_small=images is None),
    )


def _usual_side(images: Any, rows: np.ndarray) -> int:
    """Return the median of some images' shorter sides, or 0 if no image can be read."""
    found = []
    for row in rows[np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(int)]:
        with contextlib.suppress(Exception):
            content = images.content(int(row))
            found.append(min(np.load(io.BytesIO(content)).shape[:2] if is_array(content) else header_size(content)))
    return int(statistics.median(found)) if found else 0


def _has_bf16() -> bool:
    with contextlib.suppress(OSError):
        return not {*BF16}.isdisjoint(PROCESSOR.read_text(errors="replace").split())
    return False


def _weights(given: Mapping[str, Any], effort: str, *, has_gpus: bool, is_small: bool) -> Published | None:
    """Return the pretrained weights of the given network, or of the network to be chosen; None if it has none."""
    if file := given.get("weights"):
        with contextlib.suppress(Exception), open_weights(os.path.expanduser(file)) as reader:  # not a file of ours
            facts = read_facts(reader)
            size = min(sides(facts["preprocessing"].image_size))
            return Published(facts["description"].model_type, size, where=as_typed(f"of {file}"))
        return None
    name = str(given.get("model_type", PUBLISHED[has_gpus][EFFORTS.index(effort)]))
    if is_small or given.get("pretrained") is False:
        return None
    import timm
    from timm.models import get_pretrained_cfg

    timm_name = MODELS[name].timm_name if name in MODELS else name.removeprefix(TIMM_PREFIX)
    config: Any = get_pretrained_cfg(timm_name) if timm_name and timm.is_model(timm_name) else None
    if not (config and config.has_weights):
        return None
    where, is_wanted = _where(config.hf_hub_id), bool(given.get("pretrained"))
    return Published(name, config.input_size[-1], config.license or "", where, is_there=bool(where) or is_wanted)


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
