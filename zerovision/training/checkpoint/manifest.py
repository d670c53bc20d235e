"""The manifest of a checkpoint: position and configuration of the run, and a hash of every file.

A folder without a manifest is not a checkpoint, and a manifest is valid only if its own sha256 matches. Because the
file may be damaged or malicious, it is JSON, its size is limited, and no file names are taken from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerovision.training.base.errors import one_line
from zerovision.training.base.files import sync_to_disk
from zerovision.training.base.progress import Progress

MANIFEST_FILE = "manifest.json"
FROZEN = "frozen.safetensors"  # the frozen weights
FORMAT = "zerovision checkpoint 3"
LARGEST_MANIFEST = 64 * 2**20  # bytes; a million classes with long names fit
MOST_SHARDS = 100_000


class UnusableCheckpoint(Exception):
    """Raised for a checkpoint that cannot be used; the message is the reason, in one line."""


@dataclass(frozen=True)
class ShardFacts:
    """Size in bytes and sha256 (hexadecimal) of one rank's file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
        progress: position of the run.
        identity: what a resuming run must have in common with the saved run: model, classes, data and global batch.
        config: configuration of the run that saved the checkpoint.
        applied_steps: number of updates that the optimizer has applied, for Adam's bias correction.
        loss_scale: state of the dynamic loss scale; None if the precision is not fp16.
        parameters: shape of every parameter.
        shards: one entry per rank.
        data_ranks: number of ranks with their own images.
        frozen: size and hash of the file of frozen weights; None if all weights are in the shards.
    """

    progress: Progress
    identity: dict[str, Any]
    config: dict[str, Any]
    applied_steps: int
    loss_scale: dict[str, float] | None
    parameters: dict[str, list[int]]
    shards: tuple[ShardFacts, ...]
    data_ranks: int = 1
    frozen: ShardFacts | None = None


def shard_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"shard-{rank:05d}.safetensors"


def file_names(manifest: Manifest) -> dict[str, ShardFacts]:
    """Return size and hash of each file of a checkpoint except the manifest, by file name."""
    files = {shard_name(rank): facts for rank, facts in enumerate(manifest.shards)}
    return files | ({FROZEN: manifest.frozen} if manifest.frozen else {})


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and wait until it is on disk."""
    content = {"format": FORMAT, **vars(manifest)}
    path = folder / MANIFEST_FILE
    path.write_text(json.dumps(content | {"sha256": _digest(content)}, indent=1, default=vars) + "\n", encoding="utf-8")
    sync_to_disk(path)


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest, without the shards, or raise UnusableCheckpoint."""
    path = folder / MANIFEST_FILE
    try:
        if file_size(path) > LARGEST_MANIFEST:
            raise UnusableCheckpoint(f"{MANIFEST_FILE} is larger than {LARGEST_MANIFEST >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
        is_ours = isinstance(content, dict) and content.get("format") == FORMAT
        is_unchanged = is_ours and content.pop("sha256", None) == _digest(content)
    except FileNotFoundError:
        raise UnusableCheckpoint(f"it has no {MANIFEST_FILE}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnusableCheckpoint(f"{MANIFEST_FILE} cannot be read: {one_line(error)}") from None
    if not is_ours:
        raise UnusableCheckpoint(f"{MANIFEST_FILE} does not have format '{FORMAT}'")
    if not is_unchanged:
        raise UnusableCheckpoint(f"{MANIFEST_FILE} was changed after it was written: its sha256 does not match")
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnusableCheckpoint(f"{MANIFEST_FILE} has a missing or wrong value: {one_line(error)}") from None


def file_size(path: Path) -> int:
    """Return a regular file's size in bytes, or raise UnusableCheckpoint: reading a named pipe would block forever."""
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise UnusableCheckpoint(f"{path.name} is not a regular file")
    return facts.st_size


def _parse(content: dict[str, Any]) -> Manifest:
    progress = Progress(**content["progress"])
    counts = dataclasses.asdict(progress)
    best_score, best_loss = counts.pop("best_score"), counts.pop("best_loss")
    if not (math.isfinite(best_score) and best_score <= 1 and 0 <= best_loss < math.inf):
        raise ValueError("best_score, best_loss")
    for name, value in counts.items():
        _count(value, name)
    shards = content["shards"]
    if type(shards) is not list or not 0 < len(shards) <= MOST_SHARDS:
        raise ValueError(f"shards: expected a list of 1 to {MOST_SHARDS}")
    loss_scale = content["loss_scale"]
    if loss_scale is not None:
        loss_scale = {key: float(loss_scale[key]) for key in ("value", "good_steps")}  # see DynamicLossScale.state
        if not all(0 <= value < math.inf for value in loss_scale.values()):
            raise ValueError("loss_scale")
    return Manifest(
        progress=progress,
        identity=dict(content["identity"]),
        config=dict(content["config"]),
        applied_steps=_count(content["applied_steps"], "applied_steps"),
        loss_scale=loss_scale,
        parameters={
            name: [_count(size, f"shape of {name}") for size in shape] for name, shape in content["parameters"].items()
        },
        data_ranks=_count(content["data_ranks"], "data_ranks"),
        shards=tuple(map(_shard_facts, shards)),
        frozen=_shard_facts(content["frozen"]) if content.get("frozen") else None,
    )


def _shard_facts(shard: dict[str, Any]) -> ShardFacts:
    return ShardFacts(_count(shard["bytes"], "bytes"), str(shard["sha256"]))


def _count(value: Any, name: str) -> int:
    """Return a non-negative integer below 2**63, or raise ValueError."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(name)
    return value


def _digest(content: dict[str, Any]) -> str:
    """Return the sha256 of the content, independent of the order of keys and of whitespace."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":"), default=vars).encode()).hexdigest()
