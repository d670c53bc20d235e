"""Watches the steps of a training: what waits for the GPU and where, how many kernels, which warnings."""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tests.gpu.pretended.garbage import replace

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = Path(torch.__file__).parents[1]
SHOWN_PACKAGES = ("deepspeed/", "timm/")
MENDS = "tests/gpu/pretended/garbage.py"
WARM_UP = 2  # steps: the first fills caches
NOT_PINNED = "copies from or to memory that is not pinned"
A_WAIT = "called a synchronizing CUDA operation"
OF_THE_WATCH = "Synchronization debug mode is a prototype"

_library = ctypes.CDLL(None)


def launches() -> int:
    """Return how many kernels this process would have run."""
    return _library.pretended_launches()


def pageable_copies() -> int:
    """Return the copies of this process between a GPU and memory that was not pinned."""
    return _library.pretended_pageable_copies()


class Watch:
    """Counts in the steps of one epoch, from `WARM_UP` on; the last step, which logs, is left out."""

    def __init__(self) -> None:
        self._waits: Counter[str] = Counter()  # up to now
        self._at: list[tuple[int, int, Counter[str]]] = []  # kernels, pageable copies, waits before each step
        self._warnings: list[str] = []

    def start(self) -> None:
        """Watch the process's training from now on: two methods of the project tell where its steps begin and end."""
        from zerovision.training.observe.observer import Observers

        warnings.filterwarnings("always", message=A_WAIT)
        warnings.showwarning = self._note

        def noting(before_step: Any) -> Any:
            def noted(observers: Any, position: int) -> None:
                torch.cuda.set_sync_debug_mode("warn")
                self._at.append((launches(), pageable_copies(), self._waits.copy()))
                before_step(observers, position)

            return noted

        def ending(finish: Any) -> Any:
            def ended(observer: Any) -> Any:
                torch.cuda.set_sync_debug_mode("default")
                return finish(observer)

            return ended

        replace(Observers, "before_step", noting)
        replace(Observers, "after_steps", ending)

    def report(self) -> dict[str, Any]:
        """Return the waits of a step by place (copies that are not pinned among them), its kernels, and warnings."""
        watched = self._at[WARM_UP:]
        if len(watched) < 2:
            return {"waits": {}, "kernels": 0, "warnings": self._warnings}
        first, last = watched[0], watched[-1]
        counts = last[2] - first[2] + Counter({NOT_PINNED: last[1] - first[1]})
        steps = len(watched) - 1
        kernels = [after[0] - before[0] for before, after in pairwise(watched)]
        return {
            "waits": {place: round(count / steps, 2) for place, count in sorted(counts.items())},
            "kernels": round(statistics.median(kernels)),
            "warnings": self._warnings,
        }

    def _note(self, message: Warning | str, category: type[Warning], filename: str, line: int, *_: Any) -> None:
        """Take the place of `warnings.showwarning`."""
        text = str(message)
        if A_WAIT in text:
            self._waits[place_of(sys._getframe(1))] += 1
        elif not text.startswith(OF_THE_WATCH):
            self._warnings.append(f"{_short(filename)}: {category.__name__}: {text[:150]}")


def place_of(frame: FrameType | None) -> str:
    """Return file and function of the innermost frame in the project, in DeepSpeed or in timm; no line, which moves."""
    while frame is not None:
        name = _short(frame.f_code.co_filename)
        is_ours = not os.path.isabs(name) and (ROOT / name).exists()
        # garbage.py only stands between the project and what that asks for.
        if (is_ours and name != MENDS) or name.startswith(SHOWN_PACKAGES):
            return f"{name}: {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "outside the project"


def _short(file: str) -> str:
    """Return a file's path in the packages or in the project, the packages first: they may be in its folder."""
    for folder in (PACKAGES, ROOT):
        if file.startswith(f"{folder}{os.sep}"):
            return file.removeprefix(f"{folder}{os.sep}")
    return file
