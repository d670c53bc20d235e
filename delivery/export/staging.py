"""Files that appear under their names only when all is well, and otherwise leave nothing behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import TracebackType

from training.checkpoint.atomic_write import remove_leftovers, sync_to_disk, unfinished
from training.errors import UserError


class Stage:
    """A hidden folder inside the output folder, for unfinished files; `publish` gives them their names.

    Leaving the `with` block removes it, and after an error the folders that were made for it. What the disk refuses
    becomes a `UserError`.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._made: list[Path] = []
        self._folder = unfinished(output / "export", "tmp")

    def __enter__(self) -> Path:
        missing = [folder for folder in (self._output, *self._output.parents) if not folder.exists()]
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            self._made = missing
            remove_leftovers(self._output)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
        except OSError as error:
            self._clean(failed=True)
            raise self._refusal(error) from None
        return self._folder

    def publish(self, names: dict[Path, str]) -> list[Path]:
        """Move files of the stage to their names in the output folder, in order; return their new paths."""
        finished = []
        for file, name in names.items():
            sync_to_disk(file)
            os.replace(file, self._output / name)
            finished.append(self._output / name)
        sync_to_disk(self._output)
        return finished

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clean(failed=error is not None)
        if isinstance(error, OSError):
            raise self._refusal(error) from error

    def _clean(self, *, failed: bool) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if failed:
            for folder in self._made:  # the innermost first; one that holds something stays
                try:
                    folder.rmdir()
                except OSError:
                    break

    def _refusal(self, error: OSError) -> UserError:
        return UserError(f"cannot write into '{self._output}': {error.strerror or error}.")
