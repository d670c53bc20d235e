"""What `torch.compile` has compiled, kept between the starts of a user's runs.

PyTorch looks for compiled code in a folder, by keys that cover the graph, its own version and options. A compiler that
is killed leaves half a library there, which every later start would load. So each start has a folder of its own, and
what is complete is kept in one file with its hash. PyTorch unpickles what it finds: the file lies in a folder that
only its user can write to, never in a run's.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import platform
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from training.checkpoint.atomic_write import remove_leftovers, replacing, unfinished
from training.errors import UserError, one_line
from training.parallel.collectives import agreed, gather_objects
from training.parallel.exchange import optional, text
from training.parallel.world import World

KEPT = Path("~/.cache/zerovision/compiled")
MOST_BYTES = 2 * 10**9  # of all files together; mobilenet's has 15 MB
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_DIGEST_BYTES = 32


class CompiledCode:
    """Compiled code in the folder of this start, and the file that keeps it.

    The first rank of each machine makes the folder, reads the file and writes it; the others use the folder. If the
    environment names a folder, that is used as it is, and nothing is kept beside it.

    Attributes:
        notes: lines for the log about what cannot be kept or used.
    """

    def __init__(self, recipe: Any, world: World) -> None:
        """Make the folder and fill it from the file; a collective.

        Args:
            recipe: what the compiled code depends on, beside the machine and the versions; its repr is its name.
            world: the ranks.

        Raises:
            UserError: on all ranks, if a machine has no place for the folder.
        """
        # Imported here: only compiled runs need PyTorch's compiler.
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        self.notes: list[str] = []
        self._file: Path | None = None
        self._folder: Path | None = None
        self._num_kept, self._has_stepped = 0, False
        name = hashlib.sha256(repr((recipe, *_machine(world.device))).encode()).hexdigest()[:32]
        # Importing torch._dynamo sets the variable to PyTorch's default in the temporary folder of that time.
        default = Path(default_cache_dir()).name
        is_given = Path(os.environ.get(VARIABLE, default)).name != default
        makes_folder = world.local_rank == 0 and not is_given
        agreed(lambda: self._make_folder(f"{name}.zip") if makes_folder else None, world)
        folders = gather_objects(str(self._folder) if self._folder else None, optional(text), world)
        if folder := folders[world.rank - world.local_rank]:
            os.environ[VARIABLE] = folder

    def keep_after_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what the first step has compiled as soon as it is done: a fault may come before the epoch's end."""

        def keep(*_: Any) -> None:
            if not self._has_stepped:
                self._has_stepped = True
                self.keep()

        optimizer.register_step_post_hook(keep)

    def keep(self) -> None:
        """Write the file anew if anything was compiled since; no rank of this machine may be compiling."""
        files = self._files()
        if self._file is None or len(files) == self._num_kept:
            return
        packed = io.BytesIO()
        # Nothing depends on what cannot be kept.
        with contextlib.suppress(OSError):
            with zipfile.ZipFile(packed, "w", strict_timestamps=False) as archive:
                for path in files:
                    archive.write(path, path.relative_to(self._folder or ""))
            content = packed.getvalue()
            with replacing(self._file, durable=True) as temporary:
                temporary.write_bytes(content + hashlib.sha256(content).digest())
            self._num_kept = len(files)
            _remove_least_recently_used(self._file.parent)

    def close(self) -> None:
        """Keep what was compiled since, and remove the folder."""
        self.keep()
        if self._folder is not None:
            os.environ.pop(VARIABLE, None)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _make_folder(self, name: str) -> None:
        try:
            home = _own_folder(KEPT.expanduser())
            remove_leftovers(home)
            self._file = home / name
            self._folder = unfinished(self._file, "new")
            self._folder.mkdir(mode=0o700)
            self._read()
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            self.notes.append(f"compiled code is not kept for later starts: {one_line(error)}")
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._file = None
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="zerovision-compiled-"))
            except OSError as second:
                raise UserError(f"--compile: no folder for compiled code: {one_line(second)}") from None

    def _read(self) -> None:
        """Fill the folder from the file, all or nothing."""
        assert self._file is not None
        assert self._folder is not None
        try:
            content = self._file.read_bytes()
        except FileNotFoundError:
            return
        packed, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if hashlib.sha256(packed).digest() != digest:
            self._file.unlink()
            self.notes.append(f"{self._file} is damaged and was removed: compiling again")
            return
        # Not tarfile: until 3.11.4 (Debian 12 has 3.11.2) its archives may write outside the folder, zipfile's never.
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            archive.extractall(self._folder)
        self._num_kept = len(self._files())
        os.utime(self._file)

    def _files(self) -> list[Path]:
        """Return what is complete in the folder: neither locks nor what is being written."""
        found = self._folder.rglob("*") if self._folder else ()
        return [path for path in found if path.suffix != ".lock" and not path.name.startswith(".") and path.is_file()]


def _own_folder(folder: Path) -> Path:
    """Make a folder that only this user can write to.

    Raises:
        OSError: if it cannot be made, is another user's, or others can write to it.
    """
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if folder.is_symlink() or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise PermissionError(f"{folder} must be a folder that only you can write to")
    return folder


def _machine(device: torch.device) -> list[Any]:
    """Return what compiled code depends on beside the model: versions, threads, and the processor or GPU."""
    processor = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        processor = "\n".join(
            line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))
        )
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return [torch.__version__, sys.version, torch.get_num_threads(), processor, gpu]


def _remove_least_recently_used(folder: Path) -> None:
    """Remove files until the rest has at most `MOST_BYTES`."""
    facts = {path: path.stat() for path in folder.glob("*.zip")}
    total = 0
    for path in sorted(facts, key=lambda path: facts[path].st_mtime, reverse=True):
        total += facts[path].st_size
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)
