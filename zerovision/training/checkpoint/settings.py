"""The settings for checkpoints, for resuming, and for ending a run."""

from __future__ import annotations

import dataclasses
from typing import Literal

from zerovision.training.base.settings import option
from zerovision.training.recipe.settings import RecipeSettings


@dataclasses.dataclass(frozen=True)
class CheckpointSettings(RecipeSettings):
    """The settings for checkpoints, for resuming, and for what ends a run."""

    resume: str = option(
        "never",
        "never; auto: resume from the newest good checkpoint of --run-name, or start a new run if there is none; "
        "must: resume, or fail if there is no checkpoint; or a checkpoint folder.",
    )
    save_every_steps: int = option(
        0, "Optimizer steps between checkpoints within an epoch; 0: do not save by steps.", low=0
    )
    save_every_minutes: float = option(
        5.0, "Minutes between checkpoints within an epoch; 0: do not save by time.", low=0
    )
    keep_last: int = option(
        2, "Number of newest checkpoints to keep, besides the best epoch's checkpoint.", low=1, high=100_000
    )
    max_bad_steps: int = option(
        10, "End the run after this many skipped steps in a row (gradient not finite); 0: never.", low=0
    )
    on_oom: Literal["stop", "adapt"] = option(
        "stop",
        "What to do when memory runs out; adapt: the launcher restarts from the newest checkpoint, each time with "
        "the next of these changes: a smaller micro-batch (same global batch), activation checkpointing, a higher "
        "ZeRO stage, or offload.",
    )
    hang_timeout: float = option(
        300.0,
        "Seconds without a finished step after which a rank is considered hung (five times as long for the first "
        "step and for saves).",
        above=0,
        high=10**6,
    )
