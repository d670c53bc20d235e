"""The command that trains a run again, from its configuration."""

from __future__ import annotations

import shlex

from training.config import FLAG_OF, TrainConfig
from training.config.values import WORDS_OF_LAUNCH, show_value

# Where a run's files go and how it is watched is no part of what is repeated; a preset's values are given one by one,
# because those that were overridden may be the defaults, which are left out.
NOT_REPEATED = frozenset({*WORDS_OF_LAUNCH, "preset", "run_name", "log_dir", "progress", "resume", "profile"})


def reproduce_command(config: TrainConfig, ranks: int, ranks_per_machine: int) -> str:
    """Return the line that trains the same again: the launcher's words, and every flag that is not at its default."""
    defaults = TrainConfig()
    changed = (name for name in FLAG_OF if getattr(config, name) != getattr(defaults, name))
    flags = [
        word
        for name in changed
        if name not in NOT_REPEATED
        for word in _words(FLAG_OF[name], show_value(getattr(config, name)))
    ]
    machines = ranks // max(ranks_per_machine, 1)
    counts = [str(ranks)] if machines <= 1 else [str(machines), str(ranks_per_machine)]
    script = "scripts/launch_distributed.sh" if machines <= 1 else "scripts/launch_multi_node.sh"
    model, strategy, batch_size, epochs = (str(getattr(config, name)) for name in WORDS_OF_LAUNCH)
    return shlex.join(["bash", script, model, strategy, *counts, batch_size, epochs, *flags])


def _words(flag: str, value: str) -> list[str]:
    """Return a flag and its value, as one word if the value would be taken for a flag."""
    return [f"{flag}={value}"] if value.startswith("-") else [flag, value]
