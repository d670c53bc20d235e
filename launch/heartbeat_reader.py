"""The launcher's side of the heartbeats: reads what the ranks have written (`training.base.heartbeat`)."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from training.base.heartbeat import CHECKPOINT, RUN_NAME, SUCCESS, Heartbeat, beat_of, stack_path

OWNER = "owner"  # the mark of the launch, locked by the process that made the folder


class HeartbeatFolder:
    """The folder of one launch on one machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def beats(self) -> dict[int, Heartbeat]:
        """Return each rank's last beat by rank, without those being written at this moment."""
        found = {}
        for path in self.path.glob("rank-*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                if beat := beat_of(path.read_bytes()):
                    found[beat.rank] = beat
        return found

    def stack(self, rank: int) -> str | None:
        """Return the stacks that a rank has written so far; None if it has not called `watch_stacks`."""
        try:
            return stack_path(self.path, rank).read_text(errors="replace")
        except OSError:
            return None

    def run_name(self) -> str:
        """Return the run's name, '' if rank 0 has not written it."""
        return self._read(RUN_NAME)

    def checkpoint_position(self) -> int:
        """Return the newest checkpoint's position, -1 if none was saved since `clear`."""
        return int(self._read(CHECKPOINT) or -1)

    def has_succeeded(self) -> bool:
        """Return whether rank 0 has reported that training is done."""
        return (self.path / SUCCESS).exists()

    def clear(self) -> None:
        """Remove everything, before the ranks are started again."""
        self.path.mkdir(mode=0o700, exist_ok=True)  # somebody may have emptied the folder for temporary files
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != OWNER:
                path.unlink(missing_ok=True)

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text()
        except OSError:
            return ""
