"""What can happen to the files of a checkpoint: each function damages one thing and says what it did."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

MANIFEST = "manifest.json"
POINTER = "last"
# A number that stands as a JSON value, not inside a quoted string.
NUMBER = re.compile(r"(?<=[\s:\[,])-?\d+(?:\.\d+)?(?=[\s,\]}])")

Damage = Callable[[Path, Random], str]


def manifests(checkpoints: Path) -> list[Path]:
    """Return the manifests of all checkpoints that are under their final name, oldest position first."""
    return sorted(checkpoints.glob(f"step-*/{MANIFEST}"))


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """Return the folder that the pointer names, or else the one of the highest position; None without any."""
    pointer = checkpoints / POINTER
    if pointer.is_file():
        named = checkpoints / Path(pointer.read_text(encoding="utf-8", errors="replace").strip()).name
        if (named / MANIFEST).is_file():
            return named
    found = manifests(checkpoints)
    return found[-1].parent if found else None


def truncate_shard(checkpoint: Path, rng: Random) -> str:
    """Cut a random shard at a random length."""
    return _truncate(_any_shard(checkpoint, rng), rng)


def flip_bits(checkpoint: Path, rng: Random) -> str:
    """Flip one bit anywhere in a random shard."""
    shard = _any_shard(checkpoint, rng)
    position, bit = rng.randrange(shard.stat().st_size), rng.randrange(8)
    with shard.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))
    return f"flip bit {bit} of byte {position} of {shard.name}"


def remove_shard(checkpoint: Path, rng: Random) -> str:
    """Remove a random shard."""
    shard = _any_shard(checkpoint, rng)
    shard.unlink()
    return f"remove {shard.name}"


def edit_manifest(checkpoint: Path, rng: Random) -> str:
    """Add one to a random number of the manifest, and leave every other character as it is."""
    manifest = checkpoint / MANIFEST
    text = manifest.read_text(encoding="utf-8")
    number = rng.choice(list(NUMBER.finditer(text)))
    old = number.group()
    new = repr(float(old) + 1) if "." in old else str(int(old) + 1)
    line = text.count("\n", 0, number.start()) + 1
    manifest.write_text(text[: number.start()] + new + text[number.end() :], encoding="utf-8")
    return f"edit {MANIFEST}, line {line}: {old} -> {new}"


def truncate_manifest(checkpoint: Path, rng: Random) -> str:
    """Cut the manifest at a random length."""
    return _truncate(checkpoint / MANIFEST, rng)


def remove_manifest(checkpoint: Path, rng: Random) -> str:
    """Remove the manifest."""
    (checkpoint / MANIFEST).unlink()
    return f"remove {MANIFEST}"


def remove_checkpoint(checkpoint: Path, rng: Random) -> str:
    """Remove the whole folder that the pointer names."""
    shutil.rmtree(checkpoint)
    return "remove the folder"


def remove_pointer(checkpoint: Path, rng: Random) -> str:
    """Remove the file that names the newest checkpoint."""
    (checkpoint.parent / POINTER).unlink(missing_ok=True)
    return f"remove {POINTER}"


def garbage_pointer(checkpoint: Path, rng: Random) -> str:
    """Fill the file that names the newest checkpoint with random bytes."""
    garbage = rng.randbytes(rng.randrange(1, 64))
    (checkpoint.parent / POINTER).write_bytes(garbage)
    return f"fill {POINTER} with {len(garbage)} random bytes"


def _any_shard(checkpoint: Path, rng: Random) -> Path:
    return rng.choice(sorted(checkpoint.glob("shard-*.safetensors")))


def _truncate(file: Path, rng: Random) -> str:
    size = file.stat().st_size
    length = rng.randrange(size)
    with file.open("r+b") as opened:
        opened.truncate(length)
    return f"truncate {file.name} from {size} to {length} bytes"


DAMAGES: dict[str, Damage] = {
    "truncate_shard": truncate_shard,
    "flip_bits": flip_bits,
    "remove_shard": remove_shard,
    "edit_manifest": edit_manifest,
    "truncate_manifest": truncate_manifest,
    "remove_manifest": remove_manifest,
    "remove_checkpoint": remove_checkpoint,
    "remove_pointer": remove_pointer,
    "garbage_pointer": garbage_pointer,
}
