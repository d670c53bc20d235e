"""Lists what is in a folder of images, follows links, and counts what is passed over for the notes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from zerovision.training.base.errors import UserError
from zerovision.training.data.reading.formats import CURES, IMAGE_EXTENSIONS
from zerovision.training.data.reading.retry import FolderEntry, entries_of, patiently

FoundFile = tuple[str, int, int]  # path relative to the root, with "/", size in bytes, time of the last change in ns

NAMES_IN_NOTE = 5
# What operating systems and file servers leave in every folder, in lower case; names with a dot in front besides.
SYSTEM_NAMES = frozenset(
    {
        *("@eadir", "@recycle", "@recently-snapshot", "@sharebin", "@tmp", "#recycle", "#snapshot"),
        *("$recycle.bin", "recycler", "recycled", "system volume information", "found.000", "lost+found"),
        *("__macosx", "__pycache__", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"),
    }
)


class FolderListing:
    """Lists the folders below `root`, and counts what it follows and passes over.

    Args:
        root: The data folder, resolved.
        more: Extensions of files that are images, beside the usual ones.
    """

    def __init__(self, root: Path, more: tuple[str, ...] = ()) -> None:
        self.root, self._extensions = root, (*IMAGE_EXTENSIONS, *more)
        self._links: set[str] = set()
        self._system: dict[str, str] = {}  # path and name
        self._other_files: Counter[str] = Counter()
        self._loose: set[str] = set()

    def entries(self, folder: str) -> list[FolderEntry]:
        """Return what a folder contains, sorted by name, without hidden files and those of the system.

        Raises:
            UserError: The folder cannot be listed; a link is broken.
        """
        try:
            entries = entries_of(folder)
        except OSError as error:
            raise UserError(f"the folder {folder!r} cannot be listed: {error.strerror}.") from None
        kept = []
        for entry in entries:
            if entry.name.startswith(".") or entry.name.casefold() in SYSTEM_NAMES:
                self._system[entry.path] = entry.name
            else:
                kept.append(entry)
        broken = [entry.path for entry in kept if entry.is_symlink() and not self._exists(entry.path)]
        if broken:
            more = f" and {len(broken) - 1} more beside it are" if len(broken) > 1 else " is"
            raise UserError(f"the symbolic link {broken[0]!r}{more} broken: remove or repair it.")
        return kept

    def folders(self, folder: str) -> list[FolderEntry]:
        """Return the folders in a folder."""
        return [entry for entry in self.entries(folder) if entry.is_dir()]

    def count_loose(self, entries: Iterable[FolderEntry]) -> None:
        """Count the images among the entries of a folder of classes, which belong to no class."""
        self._loose |= {entry.path for entry in entries if self._is_image(entry.name) and entry.is_file()}

    def starts_with_images(self, folder: str) -> bool:
        """Return whether a folder contains images itself, and not just in folders below it."""

        def starts() -> bool:
            with os.scandir(folder) as scan:  # not all of it: a class may have a million
                return any(self._is_image(entry.name) and not entry.is_dir() for entry in scan)

        return patiently(starts, folder)

    def images(self, folder: str) -> list[FoundFile]:
        """Return the images in a folder and all folders below it, sorted by path; other files are counted."""
        found = []
        for entry in self._files_below(folder, [os.path.realpath(folder)]):
            if not entry.is_file():
                self._other_files["not a regular file"] += 1
            elif self._is_image(entry.name):
                found.append(self._found(entry.path, entry.stat()))
            else:
                self._other_files[os.path.splitext(entry.name)[1].lower() or "no extension"] += 1
        return sorted(found)

    def notes(self) -> Iterator[str]:
        """Yield a line each on what was passed over and what was followed."""
        if self._other_files:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self._other_files.most_common(NAMES_IN_NOTE))
            yield f"skipped {self._other_files.total()} files that are not images by type or extension: {kinds}"
            for kind, cure in CURES.items():
                if kind in self._other_files:
                    yield f"{self._other_files[kind]} {kind} could be read: {cure}"
        if self._system:
            names = ", ".join(sorted(set(self._system.values()))[:NAMES_IN_NOTE])
            yield f"passed over {len(self._system)} hidden files and folders of the system: {names}"
        if self._loose:
            first = os.path.relpath(min(self._loose), self.root)
            yield f"{len(self._loose)} images beside the class folders belong to no class, and are not used: {first}"
        if self._links:
            first = os.path.relpath(min(self._links), self.root)
            yield f"followed {len(self._links)} symbolic links, such as {first}; the folder of a link is its class"

    def _files_below(self, folder: str, chain: Sequence[str]) -> Iterator[FolderEntry]:
        """Yield the files below a folder; `chain` has the real paths of the folders that lead there."""
        for entry in self.entries(folder):
            if not entry.is_dir():
                yield entry
                continue
            real = os.path.realpath(entry.path)
            if entry.is_symlink() and any(Path(one).is_relative_to(real) for one in chain):
                raise UserError(f"the symbolic link {entry.path!r} leads to a folder that contains it: remove it.")
            yield from self._files_below(entry.path, [*chain, real])

    def _found(self, path: str, status: os.stat_result) -> FoundFile:
        return path[len(str(self.root).rstrip("/")) + 1 :], status.st_size, status.st_mtime_ns

    def _exists(self, link: str) -> bool:
        """Return whether a link leads anywhere, and count it."""
        try:
            patiently(partial(os.stat, link), link)
        except OSError:
            return False
        self._links.add(link)
        return True

    def _is_image(self, name: str) -> bool:
        return os.path.splitext(name)[1].lower() in self._extensions
