"""The settings of a training mode: when it is on, what it can be combined with, and which settings are wrong.

Modes are what a run learns, `tasks.settings.TASKS`, and how ranks share the work, `engines.settings.WAYS`. Only these
tables name a mode outside its folder. The module that defines a mode does not import torch, because launchers check the
flags too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

Values = Mapping[str, Sequence[object]]


class Mode:
    """A training mode that settings can turn on; methods that it does not override do what a run without it does.

    Attributes:
        flag: the setting that turns it on.
        goes_with: for other settings, the values that they may have with it, the usual one first.
        own: settings that have no effect without it.
        resumable: its settings that a resumed run may change.
        config: the settings of a run.
    """

    flag: ClassVar[str]
    goes_with: ClassVar[Values] = {}
    own: ClassVar[tuple[str, ...]] = ()
    resumable: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any) -> None:
        self.config = config

    def is_asked(self) -> bool:
        """Return whether the settings turn it on."""
        return getattr(self.config, self.flag) > 1

    def uses_own(self) -> bool:
        """Return whether the settings in `own` have an effect."""
        return self.is_asked()

    def mistakes(self, label_of: Mapping[str, str]) -> Iterator[str]:
        """Yield the mistakes in its settings, or raise the UserError of their parser."""
        yield from ()
