"""Small checkpoints written by the product's own code, from an engine that only pretends to be one of several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from models.weights_metadata import METADATA_KEY
from training.checkpoint.manifest import MANIFEST_FILE, Manifest, _digest, shard_name
from training.checkpoint.shards import CheckpointReader, Snapshot, write_shard
from training.checkpoint.store import checkpoint_name, choose, commit, find_candidates, set_aside, temporary_folder
from training.parallel.engine import FlatShard, Piece
from training.parallel.world import World
from training.state import Progress

ALONE = World(0, 0, 1, 1, torch.device("cpu"))
SHAPES = {"stem.weight": (4, 3), "stem.bias": (5,), "head.weight": (3, 2, 2), "scale": ()}
GROUPS = (("stem.weight", "head.weight"), ("stem.bias", "scale"))
MOMENTS = ("exp_avg", "exp_avg_sq")
IDENTITY = {"model": {"model_type": "small"}, "class list": ["cat", "dog"], "data set": "ab12", "global batch": 16}


class PretendedRank:
    """Has what `Snapshot.take` and `restore` ask of an engine, on one of `size` ranks.

    The groups are laid flat and cut evenly, whatever lies at the cut, and filled up with a number that is in no tensor.
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

    def flat_shards(self) -> list[FlatShard]:
        return [self._flat_shard(names) for names in GROUPS]

    def _flat_shard(self, names: tuple[str, ...]) -> FlatShard:
        total = sum(self.weights[name].numel() for name in names)
        share = -(-total // self.size) + 1
        begin, pieces, position = self.rank * share, [], 0
        for name in names:
            numel = self.weights[name].numel()
            first, end = max(position, begin), min(position + numel, begin + share)
            if first < end:
                pieces.append(Piece(name, first - position, first - begin, end - first))
            position += numel

        def part(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            flat = torch.full((share * self.size,), 777.0)
            flat[:total] = torch.cat([tensors[name].flatten() for name in names])
            return flat[begin : begin + share]

        moments = {kind: part(tensors) for kind, tensors in self.moments.items()}
        return FlatShard(part(self.weights), moments, tuple(pieces))

    def parameter_shapes(self) -> dict[str, list[int]]:
        return {name: list(tensor.shape) for name, tensor in self.weights.items()}

    def write_state(self, weights, moments, applied_steps: int) -> None:
        self.weights = {name: weights[name] for name in self.weights}
        self.moments = {kind: {name: tensors[name] for name in self.weights} for kind, tensors in moments.items()}
        self.applied_steps = applied_steps


def write_checkpoint(
    folder: Path,
    progress: Progress,
    *,
    seed: int = 0,
    ranks: int = 2,
    is_best: bool = False,
    keep_last: int = 3,
    **facts,
) -> Path:
    """Write and commit a checkpoint of as many pretended ranks; `facts` replace those of its manifest."""
    name = checkpoint_name(progress)
    temporary = temporary_folder(folder, name)
    temporary.mkdir(parents=True)
    shards = []
    for rank in range(ranks):
        engine, snapshot = PretendedRank(rank, ranks, seed), Snapshot()
        snapshot.take(engine, engine.epoch_sums)
        shards.append(write_shard(temporary / shard_name(rank), snapshot))
    content = {
        "progress": progress,
        "identity": IDENTITY,
        "config": {"epochs": 5},
        "applied_steps": 9,
        "loss_scale": None,
        "parameters": engine.parameter_shapes(),
        "shards": tuple(shards),
    }
    commit(folder, name, Manifest(**content | facts), is_best=is_best, keep_last=keep_last)
    return folder / name


def newest(folder, resume="must"):
    """Return the checkpoint that a run would go on from, and what it would say; damaged ones are set aside."""
    candidates, notes = find_candidates(resume, folder, is_restart=False)
    found, refused = choose(candidates, ALONE)
    set_aside(folder, refused)
    return found, notes + [f"{path}: {reason}" for path, reason in refused.items()]


def holds_weights_of(found, seed):
    expected = PretendedRank(seed=seed).weights
    read = CheckpointReader(found.path, found.manifest).weights
    return all(torch.equal(read[name], expected[name]) for name in SHAPES)


def forge_manifest(checkpoint: Path, change) -> None:
    """Let `change(content)` alter a manifest, and give it the sha256 that fits."""
    path = checkpoint / MANIFEST_FILE
    content = json.loads(path.read_text())
    del content["sha256"]
    change(content)
    path.write_text(json.dumps(content | {"sha256": _digest(content)}))


def forge_shard(checkpoint: Path, rank: int, tensors: dict[str, torch.Tensor], layout) -> None:
    """Replace a shard, and the hash of it in the manifest."""
    path = checkpoint / shard_name(rank)
    path.unlink()
    save_file(tensors, path, metadata={METADATA_KEY: json.dumps(layout)})
    trust_shard(checkpoint, rank)


def trust_shard(checkpoint: Path, rank: int) -> None:
    """Give the manifest the size and the sha256 that a shard has now."""
    from training.checkpoint.shards import _sha256

    path = checkpoint / shard_name(rank)
    facts = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    forge_manifest(checkpoint, lambda content: content["shards"].__setitem__(rank, facts))
