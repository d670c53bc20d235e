"""Where a run begins: its folder, the checkpoint it resumes from, whether that fits, and restoring the state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError

from training.base.control_groups import usable_cores
from training.base.errors import AgreedError, UserError, one_line, shown
from training.base.heartbeat import HeartbeatWriter
from training.base.run_folder import EVALUATION, IMAGES, WEIGHTS, RunFolder
from training.base.run_lock import Origin
from training.checkpoint.manifest import DamagedCheckpoint, Manifest
from training.checkpoint.shards import CheckpointReader
from training.checkpoint.state import TrainState
from training.checkpoint.store import FoundCheckpoint, choose, find_candidates, set_aside
from training.config import CHANGEABLE_ON_RESUME, FIELDS, FLAG_OF, TrainConfig
from training.config.global_batch import divide, divide_given, largest_divisor
from training.config.values import is_allowed
from training.data import data_options, load_data
from training.data.datasets import SMALLEST_BYTE_STD, DatasetPair
from training.data.image_list import describe_change, read_image_list
from training.engines.parameter_shards import EngineState, frozen_parameters
from training.observe.environment import RunFacts
from training.observe.evaluation import check_replaceable
from training.observe.new_run import create_run_folder, run_folder
from training.observe.scores import ScoreSums
from training.world.collectives import agreed, broadcast_object
from training.world.exchange import row_of, text, whole_number
from training.world.world import World


@dataclass(frozen=True)
class RunStart:
    """A start of a run.

    Attributes:
        origin: what started it and how often it was restarted.
        heartbeat: signs of life for the launcher.
        predict: writes on rank 0 the memory that is predicted for a run, when it ends.
        plan_memory: predicts on rank 0 the bytes that a rank takes under configurations of the run.
    """

    origin: Origin
    heartbeat: HeartbeatWriter
    predict: Callable[[RunFacts], None] | None = None
    plan_memory: Callable[[RunFacts, Sequence[TrainConfig]], list[int]] | None = None


DATA_SET, NORMALIZATION = "data set", "normalization"  # their keys in `Manifest.identity`
FIRST_START = RunStart(Origin(), HeartbeatWriter(None, 0, 0.0))


def create_folder(config: TrainConfig, start: RunStart, world: World) -> tuple[RunFolder, IO[bytes] | None]:
    """Create the run's folders on rank 0, see `create_run_folder`; a collective.

    Returns:
        The folders, and on rank 0 the file that locks the run as long as it is open.
    """

    def create() -> tuple[RunFolder, IO[bytes]]:
        if config.run_name:
            check_replaceable(run_folder(config).path / EVALUATION)  # by that of the best epoch
        return create_run_folder(config, start.origin)

    created, lock = agreed(lambda: create() if world.is_main else (None, None), world)
    paths = [str(created.log_dir), created.name] if created else None
    log_dir, name = broadcast_object(paths, row_of(text, text), world)
    if world.is_main:
        start.heartbeat.run_name(name)
    return RunFolder(Path(log_dir), name), lock


def find_checkpoint(
    config: TrainConfig, folder: RunFolder, start: RunStart, world: World
) -> tuple[FoundCheckpoint | None, list[str]]:
    """Return the checkpoint to resume from, None for a fresh start, and notes for the log; a collective.

    Raises:
        UserError: on all ranks, if the user asked for a checkpoint and there is no good one.
    """
    is_restart = start.origin.restarts > 0
    candidates, notes = agreed(lambda: find_candidates(config.resume, folder.checkpoints, is_restart=is_restart), world)
    found, refused = choose(candidates, world)
    if refused and found is None:
        if config.resume not in ("auto", "never"):
            raise AgreedError(f"--resume {config.resume}: no good checkpoint. {next(iter(refused.values()))}")
        notes.append("no good checkpoint is left: starting from the beginning")
    if world.is_main:
        set_aside(folder.checkpoints, refused)
    return found, notes + [f"checkpoint {path} is skipped: {reason}" for path, reason in refused.items()]


def keep_starting_weights(config: TrainConfig, found: FoundCheckpoint | None) -> TrainConfig:
    """Return the configuration with the weights that the checkpoint's run began with, which a resume does not load.

    So what describes the run, and repeats it, names them.
    """
    if found is None:
        return config
    saved = {name: found.manifest.config.get(name, FIELDS[name].default) for name in ("weights", "pretrained")}
    return dataclasses.replace(
        config, **{name: value for name, value in saved.items() if is_allowed(value, FIELDS[name])}
    )


def keep_global_batch(config: TrainConfig, found: FoundCheckpoint | None, world: World) -> TrainConfig:
    """Return the configuration with the accumulation steps of the checkpoint's global batch, or of `--global-batch`.

    With `--batch-size auto` the micro-batch is the checkpoint's, or what fewer or more ranks can share of it; without
    a checkpoint it stays to be found.

    Raises:
        UserError: if the ranks and the batch size do not divide it; the message has values that do.
    """
    if found is None:
        return config if config.batch_size == "auto" else divide_given(config, world.size)
    global_batch = _saved_global_batch(config, found)
    if config.batch_size == "auto":
        share = max(1, global_batch // world.size)
        config = dataclasses.replace(config, batch_size=largest_divisor(share, _saved_batch_size(found)))
    return divide(config, global_batch, world.size, "the checkpoint's global batch of")


def _saved_global_batch(config: TrainConfig, found: FoundCheckpoint) -> int:
    """Return the global batch that a checkpoint was made with; raise a UserError if another one is asked for."""
    global_batch = found.manifest.identity.get("global batch")
    if type(global_batch) is not int or not 0 < global_batch < 2**63:
        raise UserError(f"checkpoint {found.path}: its global batch {shown(global_batch)} is no whole number.")
    if config.global_batch not in (0, global_batch):
        raise UserError(
            f"--global-batch {config.global_batch}: the checkpoint's is {global_batch}. Leave it out to go on, or "
            "start a new run with --weights."
        )
    return global_batch


def _saved_batch_size(found: FoundCheckpoint) -> int:
    """Return the micro-batch that a checkpoint was made with."""
    saved = found.manifest.config.get("batch_size")
    if type(saved) is not int or not 1 <= saved <= FIELDS["batch_size"].metadata["high"]:
        raise UserError(f"checkpoint {found.path}: its --batch-size {shown(saved)} is no whole number.")
    return saved


def keep_normalization(config: TrainConfig, data: DatasetPair, found: FoundCheckpoint | None) -> DatasetPair:
    """Return the data set, normalized as the checkpoint's was: for the weights that its run began with.

    Of a channel of one value older checkpoints have the deviation 0.

    Raises:
        UserError: if the checkpoint's is none.
    """
    saved = found.manifest.identity.get(NORMALIZATION) if found else None  # younger than the format
    if found is None or saved in (None, normalization_of(data)):
        return data
    try:
        mean, std = tuple(map(float, saved["mean"])), tuple(max(float(one), SMALLEST_BYTE_STD) for one in saved["std"])
    except (TypeError, ValueError, LookupError):
        raise UserError(f"checkpoint {found.path} cannot be used: its normalization is {shown(saved)}.") from None
    return load_data(dataclasses.replace(data_options(config), mean=mean, std=std))


def normalization_of(data: DatasetPair) -> dict[str, list[float]]:
    """Return the means and standard deviations, per channel of pixels in 0..1, as `Manifest.identity` has them."""
    return {name: list(data.preprocessing[name]) for name in ("mean", "std")}


def keep_threads(config: TrainConfig, found: FoundCheckpoint | None, world: World) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with the threads that a CPU rank shall have, and notes for the log; a collective.

    They decide the last bits of every kernel: a run keeps those that it began with, on any number of ranks and cores,
    unless the user gives others.
    """
    if world.device.type != "cpu":
        return config, []
    saved = found.manifest.config.get("threads_per_rank", 0) if found else 0  # younger than the format
    if type(saved) is not int or not 0 <= saved <= FIELDS["threads_per_rank"].metadata["high"]:
        raise AgreedError(f"the checkpoint's --threads-per-rank {shown(saved)} is no number of threads.")
    own = broadcast_object(torch.get_num_threads(), whole_number, world)
    threads, cores, notes = config.threads_per_rank or saved or own, usable_cores(), []
    used = threads * world.local_size
    if threads != own and used != cores:
        cost = "slower (OMP_WAIT_POLICY=passive helps)" if used > cores else f"{cores - used} idle"
        notes.append(f"{threads} thread(s) x {world.local_size} ranks on {cores} cores: {cost}, for the same bytes")
    if saved and threads != saved:
        notes.append(f"--threads-per-rank {threads} instead of {saved}: the bytes will not be those of the run so far")
    return dataclasses.replace(config, threads_per_rank=threads), notes


def note_other_leaves(config: TrainConfig, found: FoundCheckpoint | None) -> list[str]:
    """Return a note for the log if the micro-batches are not those of the checkpoint."""
    saved = found.manifest.config.get("batch_size") if found else config.batch_size
    if saved == config.batch_size:
        return []
    return [
        f"--batch-size {config.batch_size} instead of {shown(saved)}: the bytes will not be those of the run so far"
    ]


def check_fit(
    found: FoundCheckpoint,
    config: TrainConfig,
    identity: dict[str, Any],
    steps_per_epoch: int,
    data: DatasetPair | None = None,
) -> None:
    """Refuse a checkpoint of another recipe, model, class list or data set, or of a position that this run never has.

    Args:
        found: the checkpoint.
        config: this run's configuration.
        identity: this run's, see `Manifest.identity`.
        steps_per_epoch: optimizer steps of one epoch of this run.
        data: this run's, to say how it differs.

    Raises:
        UserError: with the first difference.
    """
    manifest = found.manifest
    for name, field in FIELDS.items():
        if name in CHANGEABLE_ON_RESUME:
            continue
        # A flag that is younger than the checkpoint had its default.
        saved, given = manifest.config.get(name, field.default), getattr(config, name)
        if saved != given:
            raise UserError(
                f"checkpoint {found.path} was made with {FLAG_OF[name]} {shown(saved)}, this run has {shown(given)}: "
                "give the same to go on, or start a new run with --weights."
            )
    for key, value in identity.items():
        saved = manifest.identity.get(key)
        if saved != value:
            difference, run = _difference(saved, value), found.path.absolute().parent.parent
            if key == DATA_SET and data is not None:
                difference = describe_change(read_image_list(run / IMAGES), data)
            raise UserError(
                f"checkpoint {found.path} was made with another {key}: {one_line(difference, 400)}. Give the same, or "
                f"start a new run from its weights: --weights {run / WEIGHTS} and another --run-name."
            )
    progress = manifest.progress
    if progress.epoch > config.epochs or progress.step > steps_per_epoch:
        cure = f" Give --epochs {progress.epoch} or more, or another --run-name."
        raise UserError(
            f"checkpoint {found.path} is at epoch {progress.epoch}, step {progress.step}: this run has "
            f"{config.epochs} epochs of {steps_per_epoch} steps.{cure if progress.epoch > config.epochs else ''}"
        )


def restore(found: FoundCheckpoint, state: TrainState, world: World) -> None:
    """Fill a fresh state from a verified checkpoint; a collective.

    Raises:
        UserError: if its content does not fit this model.
    """
    manifest, engine, sums = found.manifest, state.engine, state.sums
    try:
        reader, own = CheckpointReader(found.path, manifest), engine.state()
        versions = max((len(buffer) for buffer in own.buffers.values()), default=1)
        buffers = reader.buffers(world.rank, world.size, versions)
        epoch_sums = reader.epoch_sums(world.rank, world.size)
        _check_content(own, manifest, reader, buffers)
        if reader.moment_kinds and reader.frozen != frozen_parameters(engine.module).keys():
            raise DamagedCheckpoint("other parameters are frozen in it than in this model")
        _check_sums(epoch_sums, sums)
        engine.load_state(reader.tensors, buffers, manifest.applied_steps)
        sums.restore(epoch_sums)
    except (DamagedCheckpoint, SafetensorError, RuntimeError, KeyError) as error:
        raise UserError(f"checkpoint {found.path} cannot be used: {one_line(error)}") from None
    if engine.loss_scale is not None and manifest.loss_scale:
        engine.loss_scale.restore(manifest.loss_scale)
    state.progress = manifest.progress


def _check_content(
    own: EngineState, manifest: Manifest, reader: CheckpointReader, buffers: dict[str, torch.Tensor]
) -> None:
    """Refuse other parameters, buffers or moments than the engine's."""
    ours, theirs = {name: list(shape) for name, shape in own.shapes.items()}, manifest.parameters
    if ours != theirs:
        other = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        raise DamagedCheckpoint(f"{len(other)} parameters differ from this model's, first {other[0]}")
    kinds = {name: (buffer.shape, buffer.dtype) for name, buffer in own.buffers.items()}
    if kinds != {name: (buffer.shape, buffer.dtype) for name, buffer in buffers.items()}:
        raise DamagedCheckpoint("its buffers differ from this model's")
    moments, stored = sorted(own.moment_kinds), sorted(reader.moment_kinds)
    if stored != moments:
        names = one_line(", ".join(stored) or "none")
        raise DamagedCheckpoint(f"its moments are {names}, the optimizer has {', '.join(moments) or 'none'}")


def _check_sums(found: torch.Tensor, sums: ScoreSums) -> None:
    """Refuse sums that no epoch has: every later average would be wrong, or not a number."""
    own = sums.state()
    if (found.shape, found.dtype) != (own.shape, own.dtype):
        raise DamagedCheckpoint("its sums of the epoch have another shape or dtype")
    loss, top1, top5, samples = found.tolist()
    if not (0 <= loss < math.inf and 0 <= top1 <= top5 <= samples < math.inf):  # nan is in no range
        raise DamagedCheckpoint("its sums of the epoch are not those of losses and images")


def _difference(saved: Any, given: Any) -> str:
    """Return the first entry in which two values differ, or both values."""
    if isinstance(saved, dict) and isinstance(given, dict):
        for key in sorted({*saved, *given}, key=str):
            if saved.get(key) != given.get(key):
                return f"{key} {shown(saved.get(key))}, this run has {shown(given.get(key))}"
    if isinstance(saved, list) and isinstance(given, list):
        if len(saved) != len(given):
            return f"{len(saved)} entries, this run has {len(given)}"
        number = next(number for number, pair in enumerate(zip(saved, given, strict=True)) if pair[0] != pair[1])
        return f"entry {number} is {shown(saved[number])}, this run has {shown(given[number])}"
    return f"{shown(saved)}, this run has {shown(given)}"
