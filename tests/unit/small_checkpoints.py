"""Small checkpoints written by the product's own code, from an engine that only pretends to be one of several ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from tests.kit import ALONE
from tests.stored_tensors import whole_tensors
from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint.manifest import MANIFEST_FILE, Manifest, _digest, shard_name
from zerovision.training.checkpoint.shards import CheckpointReader, Snapshot, write_shard
from zerovision.training.checkpoint.store import (
    checkpoint_name,
    choose,
    commit,
    find_candidates,
    set_aside,
    temporary_folder,
)
from zerovision.training.engines.parameter_shards import EngineState, ParameterShard, flat_shards, index_of
from zerovision.training.resume import NORMALIZATION

SHAPES = {"stem.weight": (4, 3), "stem.bias": (5,), "head.weight": (3, 2, 2), "scale": ()}
GROUPS = (("stem.weight", "head.weight"), ("stem.bias", "scale"))
MOMENTS = ("exp_avg", "exp_avg_sq")
IDENTITY = {"model": {"model_type": "small"}, "class list": ["cat", "dog"], "data set": "ab12", "global batch": 16}
PREPARATION = {"mean": [0.5], "std": [0.25], "interpolation": None, "eval_crop": None}


class PretendedRank:
    """Has what `Snapshot.take` and `restore` ask of an engine, on one of `size` ranks.

    The groups are laid flat and cut evenly, whatever lies at the cut.
    """

    def __init__(self, rank: int = 0, size: int = 1, seed: int = 0) -> None:
        self.rank, self.size = rank, size
        generator = torch.Generator().manual_seed(seed)
        self.weights, *moments = [
            {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in range(3)
        ]
        self.moments = dict(zip(MOMENTS, moments, strict=True))
        self.module = nn.Module()
        self.module.register_buffer("norm_mean", torch.randn(7, generator=generator) + rank)
        self.module.register_buffer("norm_batches", torch.tensor(11))
        self.epoch_sums = torch.arange(4, dtype=torch.float64) / 3 + rank
        self.loss_scale = None
        self.applied_steps = 0

    def state(self) -> EngineState:
        shards = [shard for names in GROUPS for shard in self._shards(names)]
        shapes = {name: tuple(tensor.shape) for name, tensor in self.weights.items()}
        buffers = {name: buffer[None] for name, buffer in self.module.named_buffers()}
        return EngineState(shapes, MOMENTS, shards, buffers, (self.rank,), self.applied_steps)

    def _shards(self, names: tuple[str, ...]) -> Iterator[ParameterShard]:
        total = sum(self.weights[name].numel() for name in names)
        share = -(-total // self.size) + 1
        begin, position = self.rank * share, 0
        flats = {
            kind: torch.cat([tensors[name].flatten() for name in names])
            for kind, tensors in {"weights": self.weights, **self.moments}.items()
        }
        for name in names:
            numel = self.weights[name].numel()
            first, end = max(position, begin), min(position + numel, begin + share)
            yield from flat_shards(name, SHAPES[name], first - position, end - position, flats, first)
            position += numel

    def load_state(self, tensors, buffers, applied_steps: int) -> None:
        self.weights, *moments = [
            {name: tensors[kind](name, index_of([0] * len(shape), shape)) for name, shape in SHAPES.items()}
            for kind in ("weights", *MOMENTS)
        ]
        self.moments = dict(zip(MOMENTS, moments, strict=True))
        for name, buffer in self.module.named_buffers():
            buffer.copy_(buffers[name][0])
        self.applied_steps = applied_steps


def write_checkpoint(
    folder: Path,
    progress: Progress,
    *,
    seed: int = 0,
    ranks: int = 2,
    is_best: bool = False,
    keep_last: int = 3,
    kept: str = "",
    **facts,
) -> Path:
    """Write and commit a checkpoint of as many pretended ranks; `facts` replace those of its manifest."""
    name = checkpoint_name(progress)
    temporary = temporary_folder(folder, name)
    temporary.mkdir(parents=True)
    shards = []
    for rank in range(ranks):
        engine, snapshot = PretendedRank(rank, ranks, seed), Snapshot()
        snapshot.take(engine.state(), engine.epoch_sums, rank=rank)
        shards.append(write_shard(temporary / shard_name(rank), snapshot))
    content = {
        "progress": progress,
        "identity": IDENTITY | {NORMALIZATION: PREPARATION},
        "config": {"epochs": 5},
        "applied_steps": 9,
        "loss_scale": None,
        "data_ranks": ranks,
        "parameters": {name: list(shape) for name, shape in SHAPES.items()},
        "shards": tuple(shards),
    }
    commit(folder, name, Manifest(**content | facts), is_best=is_best, keep_last=keep_last, kept=kept)
    return folder / name


def newest(folder, resume="must"):
    """Return the checkpoint that a run would go on from, and what it would say; damaged ones are set aside."""
    candidates, notes = find_candidates(resume, folder, is_restart=False)
    found, refused = choose(candidates, ALONE)
    set_aside(folder, refused)
    return found, notes + [f"{path}: {reason}" for path, reason in refused.items()]


def holds_weights_of(found, seed):
    expected = PretendedRank(seed=seed).weights
    read = whole_tensors(CheckpointReader(found.path, found.manifest))["weights"]
    return all(torch.equal(read[name], expected[name]) for name in SHAPES)


def forge_manifest(checkpoint: Path, change) -> None:
    """Let `change(content)` alter a manifest, and give it the sha256 that fits."""
    path = checkpoint / MANIFEST_FILE
    content = json.loads(path.read_text())
    del content["sha256"]
    change(content)
    path.write_text(json.dumps(content | {"sha256": _digest(content)}))


def forge_shard(checkpoint: Path, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    """Replace a shard, and the hash of it in the manifest."""
    path = checkpoint / shard_name(rank)
    path.unlink()
    save_file(tensors, path)
    trust_shard(checkpoint, rank)


def trust_shard(checkpoint: Path, rank: int) -> None:
    """Give the manifest the size and the sha256 that a shard has now."""
    from zerovision.training.base.files import sha256_of

    path = checkpoint / shard_name(rank)
    facts = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    forge_manifest(checkpoint, lambda content: content["shards"].__setitem__(rank, facts))
