"""Checkpoints: what resume restores, and nothing else.

A checkpoint is a folder logs/runs/<run>/checkpoints/step-<n>/ with `state.safetensors` (fp32 weights, buffers and
optimizer moments under their parameters' names, whole, so that any strategy and world size can read it) and
`progress.json`. It appears under its name only when it is complete; the files `last` and `best` beside it then
name it. Dropout, sample order and augmentation are functions of (seed, step), so no random state is stored.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from training.distributed import World, barrier
from training.durable import sync_to_disk
from training.engine import Engine
from training.errors import UserError

STATE_FILE, PROGRESS_FILE = "state.safetensors", "progress.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        epoch: the epoch to go on with, from 0.
        step: the optimizer step of that epoch to go on with, from 0.
        best_top1: the best validation top-1 so far, -1 before the first evaluation.
        best_epoch: the epoch of it, from 1; 0 before the first evaluation.
        epochs_without_better: evaluations since then, for early stopping.
    """

    epoch: int = 0
    step: int = 0
    best_top1: float = -1.0
    best_epoch: int = 0
    epochs_without_better: int = 0


def gather_weights(engine: Engine, world: World) -> dict[str, torch.Tensor]:
    """Return all fp32 weights and buffers by name on rank 0, nothing on the others; a collective."""
    return _on_main(engine.weights(), world)


def save_checkpoint(
    folder: Path,
    engine: Engine,
    weights: dict[str, torch.Tensor],
    progress: Progress,
    identity: dict[str, Any],
    world: World,
    *,
    is_best: bool,
) -> None:
    """Save a checkpoint and point `last` (and `best`) at it; a collective, rank 0 writes.

    Args:
        folder: the run's checkpoints folder.
        engine: the engine, for the moments.
        weights: what `gather_weights` returned, after the BatchNorm buffers were averaged.
        progress: where the run stands.
        identity: what a run that resumes must agree on; see `run._identity`.
        world: the ranks.
        is_best: whether this is the best evaluation so far.
    """
    moments = _on_main(((f"moments/{kind}/{name}", tensor) for kind, name, tensor in engine.moments()), world)
    if world.is_main:
        tensors = {f"weights/{name}": tensor for name, tensor in weights.items()} | moments
        loss_scale = engine.loss_scale.state() if engine.loss_scale else None
        content = {
            "progress": dataclasses.asdict(progress),
            "identity": identity,
            "applied_steps": engine.applied_steps(),
            "loss_scale": loss_scale,
        }
        name = f"step-{progress.epoch:05d}-{progress.step:07d}"
        _write_folder(folder / name, tensors, content)
        _point(folder / "last", name)
        if is_best:
            _point(folder / "best", name)
        _remove_unnamed(folder)
    barrier(world)


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """Return the checkpoint that `--resume` means: None for a fresh start.

    Raises:
        UserError: for `must`, or a path, without a checkpoint.
    """
    if resume == "never":
        return None
    if resume not in ("auto", "must"):
        path = Path(resume).expanduser()
        if not (path / PROGRESS_FILE).is_file():
            raise UserError(
                f"--resume {resume}: no checkpoint there (no {PROGRESS_FILE}). "
                "Give never, auto, must or a checkpoint folder."
            )
        return path
    pointer = folder / "last"
    if pointer.is_file():
        return folder / Path(pointer.read_text(encoding="utf-8").strip()).name
    if resume == "must":
        raise UserError(f"--resume must: no checkpoint in {folder}. Give the --run-name of a run that has one.")
    return None


def load_checkpoint(path: Path, engine: Engine, identity: dict[str, Any]) -> Progress:
    """Fill a fresh engine from a checkpoint; a collective, every rank reads the file.

    Raises:
        UserError: where the file is damaged, or it is a checkpoint of another model, data set or schedule.
    """
    try:
        content = json.loads((path / PROGRESS_FILE).read_text(encoding="utf-8"))
        tensors = load_file(path / STATE_FILE)
        progress = Progress(**content["progress"])
        saved_identity = dict(content["identity"])
        applied_steps = int(content["applied_steps"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"checkpoint {path} cannot be read: {' '.join(str(error).split())}") from None
    for key, value in identity.items():
        if saved_identity.get(key) != value:
            raise UserError(
                f"checkpoint {path} was made with {key} {saved_identity.get(key)!r}, this run has {value!r}."
            )
    weights = {name.removeprefix("weights/"): value for name, value in tensors.items() if name.startswith("weights/")}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("moments/"):
            _, kind, parameter_name = name.split("/", 2)
            moments.setdefault(kind, {})[parameter_name] = value
    engine.write_state(weights, moments, applied_steps)
    if engine.loss_scale is not None and content["loss_scale"]:
        engine.loss_scale.restore(content["loss_scale"])
    return progress


def _on_main(items: Iterable[tuple[str, torch.Tensor]], world: World) -> dict[str, torch.Tensor]:
    """Walk through items that every rank must produce, and keep them on rank 0 alone."""
    kept = {}
    for name, tensor in items:
        if world.is_main:
            kept[name] = tensor
    return kept


def _write_folder(path: Path, tensors: dict[str, torch.Tensor], content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary / STATE_FILE)
    (temporary / PROGRESS_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for file in (temporary / STATE_FILE, temporary / PROGRESS_FILE, temporary):
        sync_to_disk(file)
    shutil.rmtree(path, ignore_errors=True)
    temporary.rename(path)
    sync_to_disk(path.parent)


def _point(pointer: Path, name: str) -> None:
    temporary = pointer.with_name(f".{pointer.name}.tmp")
    temporary.write_text(name + "\n", encoding="utf-8")
    sync_to_disk(temporary)
    temporary.replace(pointer)
    sync_to_disk(pointer.parent)


def _remove_unnamed(folder: Path) -> None:
    pointers = [folder / "last", folder / "best"]
    named = {pointer.read_text(encoding="utf-8").strip() for pointer in pointers if pointer.exists()}
    for path in folder.glob("*step-*"):
        if path.name not in named:
            shutil.rmtree(path, ignore_errors=True)
