"""What follows when a training has run out of memory: `--on-oom adapt` starts it again with the next smaller settings.

And whether the kernel has killed a process for want of memory, which a rank cannot report itself.
"""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

from launch.arguments import check_training
from training.base.control_groups import ROOT, group_files
from training.out_of_memory import advise, next_rung

OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class Adaptation:
    """The smaller settings that a launch has come to.

    Args:
        training: arguments of the training entry, as given.
        ranks: of the launch.
        has_gpus: whether they compute on GPUs.

    Attributes:
        flags: of the training entry, to be added to its arguments.
    """

    def __init__(self, training: list[str], ranks: int, *, has_gpus: bool) -> None:
        self._training, self._ranks, self._has_gpus = training, ranks, has_gpus
        self.flags: list[str] = []

    def step_down(self, reason: str) -> bool:
        """Print what follows, and add the flags of the next rung; return False if the launch ends instead.

        Args:
            reason: what happened, without a full stop.
        """
        config = check_training([*self._training, *self.flags])
        rung = next_rung(config, self._ranks, has_gpus=self._has_gpus)
        if rung is None or config.on_oom == "stop":
            advice = advise(config, self._ranks, has_gpus=self._has_gpus)
            print(f"{reason}; {advice}", file=sys.stderr, flush=True)
            return False
        print(f"{reason}: starting again with {rung.describe()}", file=sys.stderr, flush=True)
        self.flags += rung.flags
        return True


def oom_kills(root: Path = ROOT) -> int:
    """Return how many processes the kernel has killed for want of memory so far, in this process's control group.

    That of the whole machine if the group does not say; 0 if nothing does, as in some sandboxes.

    Args:
        root: that /proc and /sys are below.
    """
    for path in [*group_files("memory", "memory.events", "memory.oom_control", root), root / "proc/vmstat"]:
        with contextlib.suppress(OSError):
            if found := OOM_KILLS.search(path.read_text()):
                return int(found[1])
    return 0
