"""What the settings say of a way of training: when it is asked for, what goes with it, and what is wrong about it.

Modes are what a run learns, `tasks.settings.TASKS`, and how ranks share the work, `engines.settings.WAYS`. Nothing else
outside its folder names one. The module that defines a mode imports no torch: launchers check the flags, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

Values = Mapping[str, Sequence[object]]


class Mode:
    """A way of training that the settings may ask for; what it leaves as it is here is done as without it.

    Attributes:
        flag: the setting that asks for it.
        goes_with: by other settings, the values that they may have beside it, the usual one first.
        own: settings that have no effect without it.
        resumable: those of its settings that a resumed run may change.
        config: the settings of a run.
    """

    flag: ClassVar[str]
    goes_with: ClassVar[Values] = {}
    own: ClassVar[tuple[str, ...]] = ()
    resumable: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any) -> None:
        self.config = config

    def is_asked(self) -> bool:
        """Return whether the settings ask for it."""
        return getattr(self.config, self.flag) > 1

    def uses_own(self) -> bool:
        """Return whether the settings `own` have an effect."""
        return self.is_asked()

    def mistakes(self, label_of: Mapping[str, str]) -> Iterator[str]:
        """Yield what is wrong about its settings, or raise the UserError of what reads them."""
        yield from ()
