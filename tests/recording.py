"""A logger that keeps what it gets."""

from __future__ import annotations

from typing import Any

from zerovision.training.base.points import StepPoint
from zerovision.training.base.run_logger import RunLogger


class Recorder(RunLogger):
    """Keeps messages, events as (kind, values), and logging points."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.points: list[StepPoint] = []

    def message(self, message: str) -> None:
        self.messages.append(message)

    def event(self, kind: str, values: dict[str, Any]) -> None:
        self.events.append((kind, values))

    def steps(self, point: StepPoint) -> None:
        self.points.append(point)
