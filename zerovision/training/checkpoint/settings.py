"""The settings for checkpoints, for resuming, and for ending a run."""

from __future__ import annotations

import dataclasses
from typing import Literal

from zerovision.training.base.settings import option
from zerovision.training.recipe.settings import RecipeSettings


@dataclasses.dataclass(frozen=True)
class CheckpointSettings(RecipeSettings):
    """The settings for checkpoints, for resuming, and for the conditions that end a run."""

    resume: str = option(
        "never", "never, auto (newest good checkpoint of --run-name, or a new run), must, or a checkpoint folder."
    )
    save_every_steps: int = option(0, "Optimizer steps between checkpoints within an epoch; 0: off.", low=0)
    save_every_minutes: float = option(5.0, "Minutes between checkpoints within an epoch; 0: off.", low=0)
    keep_last: int = option(2, "Newest checkpoints to keep, in addition to the best epoch's.", low=1, high=100_000)
    max_bad_steps: int = option(10, "Skipped steps in a row (gradient not finite) that end the run; 0: never.", low=0)
    on_oom: Literal["stop", "adapt"] = option(
        "stop",
        "What to do when memory runs out; adapt: the launcher restarts from the newest checkpoint and tries, in "
        "turn, a smaller micro-batch (same global batch), activation checkpointing, a higher ZeRO stage and offload.",
    )
    hang_timeout: float = option(
        300.0,
        "Seconds without a finished step until a rank is considered hung (first step and saves: 5 times as long).",
        above=0,
        high=10**6,
    )
