"""Finds the checkpoint to resume from, takes settings from it, and rejects a checkpoint that does not fit the run."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

import torch

from zerovision.models.preparation import Preparation
from zerovision.training.base.control_groups import usable_cores
from zerovision.training.base.errors import AgreedError, UserError, one_line, shown
from zerovision.training.base.plugins import names_of
from zerovision.training.base.progress import Progress
from zerovision.training.base.run_folder import IMAGES, WEIGHTS, RunFolder
from zerovision.training.base.units import plural
from zerovision.training.checkpoint.store import FoundCheckpoint, checkpoint_name, choose, find_candidates, set_aside
from zerovision.training.config import CHANGEABLE_ON_RESUME, FIELDS, FLAG_OF, TrainConfig
from zerovision.training.config.check import check_starting_weights
from zerovision.training.config.global_batch import divide, divide_given, largest_divisor
from zerovision.training.data import FROM_WEIGHTS, data_options, load_data
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.image_list import describe_change, read_image_list
from zerovision.training.engines.settings import TORCH, ways_of
from zerovision.training.observe.best_weights import epoch_of
from zerovision.training.recipe.schedule import stable_epochs
from zerovision.training.steps.carrier import Resumed, Run
from zerovision.training.world.collectives import agreed, broadcast_object
from zerovision.training.world.world import World


def before_decay(config: TrainConfig, found: Resumed, world: World) -> tuple[Resumed, list[str]]:
    """Return the checkpoint to resume from, and a note for the log if the number of epochs has changed; a collective.

    If the number of epochs has increased, the run goes back to the start of the decay, provided that the schedule up to
    that point does not depend on the number of epochs. A checkpoint that the user named is always used as it is.
    """
    if found.epochs in (0, config.epochs):
        return found, []
    saved, path, progress = dataclasses.replace(config, epochs=found.epochs), found.path, found.progress
    change = f"--epochs {config.epochs} instead of {saved.epochs}"
    goes_on = f"{change}: from now on, learning rate and mixing are those of a run of {config.epochs} epochs"
    start = Progress(stable_epochs(saved))
    if (
        saved.epochs > config.epochs
        or path.resolve() == Path(config.resume).expanduser().resolve()
        or start.epoch == 0
        or (progress.epoch, progress.step) <= (start.epoch, 0)
    ):
        return found, [goes_on]
    earlier, refused = choose([path.parent / checkpoint_name(start)], world)
    if earlier is None:
        reason = next(iter(refused.values()))
        return found, [f"{goes_on}; the checkpoint of epoch {start.epoch}, before the decay, cannot be used: {reason}"]
    note = f"{change}: going back to epoch {start.epoch}, the last before the learning rate decayed"
    found = agreed(lambda: resumed(earlier, config), world)
    best_epoch = found.progress.best_epoch
    has_best = world.is_main and epoch_of(path.parent.parent / WEIGHTS) == best_epoch
    if broadcast_object(has_best, world) or best_epoch == 0:
        return found, [note]
    note += f"; {WEIGHTS} will contain the best epoch from then on: epoch {best_epoch}'s weights are gone"
    progress = dataclasses.replace(found.progress, best_epoch=0, best_score=Progress.best_score)
    return dataclasses.replace(found, progress=progress), [note]


# Keys in `Manifest.identity`.
DATA_SET, GLOBAL_BATCH, NORMALIZATION = "data set", "global batch", "normalization"


def choose_checkpoint(run: Run) -> Run:
    """Find the checkpoint to resume from, and apply the settings that a run keeps: preprocessing, batch and threads.

    This is a collective. If a requested checkpoint is missing or damaged, or does not fit, raise a UserError on all
    ranks.
    """
    config, data, world, names = run.config, run.data, run.world, None
    found, notes = find_checkpoint(config, run.folder, world, is_restart=run.start.origin.restarts > 0)
    if found is None:
        agreed(lambda: check_starting_weights(config, FLAG_OF), world)
    else:
        found, decay_notes = before_decay(config, found, world)
        names, notes = found.parameters, [*notes, *decay_notes]
        data = agreed(lambda: keep_preparation(config, data, found.preparation), world)
    divided = agreed(lambda: keep_global_batch(config, found, world.data.size), world)
    divided, groups, group_notes = keep_groups(divided, names, world)
    config, thread_notes = own_threads(divided, world)
    notes = [*notes, *group_notes, *thread_notes, *note_other_bytes(config, found.settings if found else {})]
    start = dataclasses.replace(run.start, found=found, groups=groups, notes=(*run.start.notes, *notes))
    return dataclasses.replace(run, config=config, data=data, start=start)


def resumed(found: FoundCheckpoint, config: TrainConfig) -> Resumed:
    """Return what a run takes from its checkpoint, or raise a UserError.

    This function alone reads and checks these values of a manifest.
    """
    manifest, path = found.manifest, found.path
    epochs, batch_size = (manifest.config.get(name) for name in ("epochs", "batch_size"))
    global_batch = manifest.identity.get(GLOBAL_BATCH)
    preparation: Any = manifest.identity.get(NORMALIZATION)
    try:
        left_open = [name for name in FROM_WEIGHTS if getattr(config, name) == "auto" and preparation[name]]
        kept = {name: preparation[name] for name in left_open}
        kept |= {name: tuple(map(float, preparation[name])) for name in ("mean", "std")}
        if not all(FROM_WEIGHTS[name](kept[name]) for name in left_open):
            raise ValueError
    except (AttributeError, TypeError, ValueError, LookupError):
        raise UserError(f"checkpoint {path} cannot be used: its normalization is {shown(preparation)}.") from None
    if type(global_batch) is not int or not 0 < global_batch < 2**63:
        raise UserError(f"checkpoint {path}: its global batch {shown(global_batch)} is not a whole number.")
    if config.batch_size == "auto" and not _is_number(batch_size, "batch_size"):
        raise UserError(f"checkpoint {path}: its --batch-size {shown(batch_size)} is not a whole number.")
    as_saved = (manifest.progress, manifest.config, manifest.identity, manifest.parameters.keys())
    return Resumed(path, manifest, *as_saved, epochs if _is_number(epochs, "epochs") else 0, global_batch, kept)


def _is_number(value: Any, name: str) -> TypeGuard[int]:
    """Return whether a value is a whole number that a setting of a run can have."""
    return type(value) is int and 1 <= value <= FIELDS[name].metadata["high"]


def identity_of(run: Run) -> dict[str, Any]:
    """Return what a checkpoint and the run that resumes from it must have in common, besides the recipe."""
    places = run.plan.places
    in_shards = {} if places is None else {"division into shards": hashlib.sha256(places.tobytes()).hexdigest()}
    facts: dict[str, Any] = {"model": run.model.built.description.to_dict(), "class list": run.data.class_names}
    facts |= {DATA_SET: run.data.fingerprint, GLOBAL_BATCH: run.plan.global_batch}
    facts["plug-in"] = names_of(run.config.plugin) or None
    return run.task.identity | in_shards | facts


def find_checkpoint(
    config: TrainConfig, folder: RunFolder, world: World, *, is_restart: bool
) -> tuple[Resumed | None, list[str]]:
    """Return the checkpoint to resume from, or None, and notes for the log, or raise a UserError; a collective."""
    candidates, notes = agreed(lambda: find_candidates(config.resume, folder.checkpoints, is_restart=is_restart), world)
    found, refused = choose(candidates, world)
    if refused and found is None:
        if config.resume not in ("auto", "never"):
            raise AgreedError(f"--resume {config.resume}: there is no good checkpoint. {next(iter(refused.values()))}")
        notes.append("no good checkpoint is left: starting from the beginning")
    elif found is None and config.resume == "auto" and not is_restart:
        notes.append(f"run {folder.name} has no checkpoint: starting from the beginning")
    if world.is_main:
        set_aside(folder.checkpoints, refused)
    notes += [f"checkpoint {path} is skipped: {reason}" for path, reason in refused.items()]
    return agreed(lambda: resumed(found, config) if found else None, world), notes


def keep_global_batch(config: TrainConfig, found: Resumed | None, ranks: int) -> TrainConfig:
    """Return the configuration with the accumulation steps for the checkpoint's global batch or `--global-batch`.

    With `--batch-size auto`, the micro-batch is the checkpoint's or, if that does not divide a rank's share of the
    global batch, a smaller one that does. Without a checkpoint, the micro-batch is chosen later. If ranks times batch
    size does not divide the global batch, raise a UserError.
    """
    if found is None:
        return config if config.batch_size == "auto" else divide_given(config, ranks)
    if config.global_batch not in (0, found.global_batch):
        raise UserError(
            f"--global-batch {config.global_batch}: the checkpoint was made with {found.global_batch}. Leave it out to "
            "continue, or start a new run with --weights."
        )
    if config.batch_size == "auto":
        share = max(1, found.global_batch // ranks)
        config = dataclasses.replace(config, batch_size=largest_divisor(share, found.settings["batch_size"]))
    return divide(config, found.global_batch, ranks, "the checkpoint's global batch of")


def keep_preparation(config: TrainConfig, data: DatasetPair, saved: dict[str, Any]) -> DatasetPair:
    """Return the data set with the saved preprocessing, which suits the weights that its run started from."""
    here = preparation_of(data)
    kept = {name: value for name, value in saved.items() if here[name]}
    return data if here | kept == here else load_data(dataclasses.replace(data_options(config), made_for=(), **kept))


def preparation_of(data: DatasetPair) -> dict[str, Any]:
    """Return the resize filter, crop fraction, and each channel's mean and standard deviation for pixels in 0..1."""
    made = Preparation.of_run(data.preprocessing)
    return {"mean": made.mean, "std": made.std, "interpolation": made.interpolation, "eval_crop": made.crop}


def keep_groups(config: TrainConfig, names: Iterable[str] | None, world: World) -> tuple[TrainConfig, int, list[str]]:
    """Divide the ranks into independent groups, if the run uses them (see `Way.divide_ranks`); a collective.

    Return the configuration with the intended number of groups, the current number of groups, and notes for the log.
    """
    divided = (way.divide_ranks(names, world) for way in ways_of(config, TORCH))
    settings, groups, notes = next((one for one in divided if one[0]), ({}, 1, []))
    return dataclasses.replace(config, **settings), groups, notes


def own_threads(config: TrainConfig, world: World) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with the number of threads per CPU rank, and notes for the log; a collective.

    The number affects the last bits of every kernel's result, so a run keeps its first one unless the user changes it.
    """
    if world.device.type != "cpu":
        return config, []
    own, cores = broadcast_object(torch.get_num_threads(), world), usable_cores()
    threads = config.threads_per_rank or own
    config, used = dataclasses.replace(config, threads_per_rank=threads), threads * world.local_size
    if threads == own or used == cores:
        return config, []
    cost = "slower (OMP_WAIT_POLICY=passive helps)" if used > cores else f"{cores - used} idle"
    each, ranks = plural(threads, "thread"), plural(world.local_size, "rank")
    return config, [f"{each} x {ranks} on {cores} cores: {cost}; --threads-per-rank changes this and the last bits"]


def note_other_bytes(config: TrainConfig, saved: dict[str, Any]) -> list[str]:
    """Return notes for the log about allowed changes of settings after which results are no longer bit-identical."""
    return [
        f"{FLAG_OF[name]} {getattr(config, name)} instead of {shown(saved[name])}: the bytes will differ from those of "
        "the run so far"
        for name in ("threads_per_rank", "batch_size")
        if saved.get(name) and saved[name] != getattr(config, name)
    ]


def check_fit(
    found: Resumed, config: TrainConfig, identity: dict[str, Any], steps_per_epoch: int, data: DatasetPair | None = None
) -> None:
    """Raise a UserError if a checkpoint's recipe, `Manifest.identity` or position does not fit the run."""
    progress = found.progress
    for name, field in FIELDS.items():
        if name in CHANGEABLE_ON_RESUME:
            continue
        # A flag that was added after the checkpoint was saved had its default value.
        saved, given = found.settings.get(name, field.default), getattr(config, name)
        if saved != given:
            raise UserError(
                f"checkpoint {found.path} was made with {FLAG_OF[name]} {shown(saved)}, but this run has {shown(given)}"
                ": use the same value to continue, or start a new run with --weights."
            )
    for key, value in identity.items():
        saved = found.identity.get(key)
        if saved != value:
            difference, run = _difference(saved, value), found.path.absolute().parent.parent
            if key == DATA_SET and data is not None:
                difference = describe_change(read_image_list(run / IMAGES), data)
            raise UserError(
                f"checkpoint {found.path} was made with another {key}: {one_line(difference, 400)}. Use the same, "
                f"or start a new run from its weights: --weights {run / WEIGHTS} and another --run-name."
            )
    if progress.epoch > config.epochs or progress.step > steps_per_epoch:
        cure = f" Use --epochs {progress.epoch} or more, or another --run-name."
        raise UserError(
            f"checkpoint {found.path} is at epoch {progress.epoch}, step {progress.step}, but this run has "
            f"{config.epochs} epochs of {steps_per_epoch} steps.{cure if progress.epoch > config.epochs else ''}"
        )


def _difference(saved: Any, given: Any) -> str:
    """Return a description of the first entry in which two values differ, or of both values."""
    if isinstance(saved, dict) and isinstance(given, dict):
        for key in sorted({*saved, *given}, key=str):
            if saved.get(key) != given.get(key):
                return f"{key} {shown(saved.get(key))}; this run has {shown(given.get(key))}"
    if isinstance(saved, list) and isinstance(given, list):
        if len(saved) != len(given):
            return f"{len(saved)} entries; this run has {len(given)}"
        number = next(number for number, pair in enumerate(zip(saved, given, strict=True)) if pair[0] != pair[1])
        return f"entry {number} is {shown(saved[number])}; this run has {shown(given[number])}"
    return f"{shown(saved)}; this run has {shown(given)}"
