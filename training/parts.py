"""Builds the parts of a run, in the order in which a mistake is cheapest to report."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from models import build_model, model_spec
from models.build import BuiltModel
from models.checkpointing import enable_activation_checkpointing
from models.normalization import starting_normalization
from training.batchnorm import synchronize_batchnorm
from training.checkpoint.manifest import Progress
from training.checkpoint.resume import check_fit, hold_global_batch
from training.checkpoint.store import FoundCheckpoint
from training.compilation import compile_mode, resolve_compile
from training.config import TrainConfig, save_config
from training.data import DataOptions, load_data
from training.data.bundle import DataBundle
from training.data.loader import EvaluationLoader, TrainLoader, automatic_workers
from training.data.sampler import BatchPlan, EvaluationPlan
from training.data.workers import SHARED_MEMORY, workers_with_room
from training.distributed import World, agreed
from training.engine import Engine
from training.engines import build_engine, resolve_engine
from training.environment import describe_environment
from training.errors import UserError
from training.finetune import RestingBackbone
from training.flops import TrainingFlops
from training.loggers import Loggers, build_loggers
from training.loop import LoopSettings
from training.optim import build_optimizer, build_schedule
from training.precision import resolve_precision
from training.run_folder import RunFolder
from training.run_start import FIRST_START, RunStart, create_folder, find_checkpoint
from training.strategies import engine_config, read_strategy_json


@dataclass(frozen=True)
class Parts:
    """Everything that a run is made of.

    Attributes:
        config: what the user asked for.
        world: the ranks.
        precision: 'bf16', 'fp16' or 'fp32', never 'auto'.
        data: training and validation set.
        built: the model, before it was sharded.
        folder: where the run's files go.
        lock: the file that holds the run as long as it is open, on rank 0.
        settings: what the loop needs to know.
        head_epochs: epochs in which only the head learns.
        engine: the sharded model with its optimizer.
        backbone: lets all layers but the head rest.
        flops: counts the model's operations, on rank 0.
        loggers: none on ranks other than 0.
        found: the checkpoint to go on from, None for a fresh start.
        notes: what the user should know of the choice of the checkpoint.
        train_loader: this rank's training batches.
        val_loader: this rank's validation batches.
    """

    config: TrainConfig
    world: World
    precision: str
    data: DataBundle
    built: BuiltModel
    folder: RunFolder
    lock: IO[bytes] | None
    settings: LoopSettings
    head_epochs: int
    engine: Engine
    backbone: RestingBackbone
    flops: TrainingFlops | None
    loggers: Loggers
    found: FoundCheckpoint | None
    notes: list[str]
    train_loader: TrainLoader
    val_loader: EvaluationLoader

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint and the run that resumes from it must agree on, beside the recipe."""
        return _identity(self.data, self.built, self.settings.plan)

    def position(self, progress: Progress) -> int:
        """Return how many optimizer steps of the run lie behind."""
        return progress.epoch * self.settings.plan.steps_per_epoch + progress.step

    def close(self) -> None:
        """Flush the logs, end the workers, release the engine."""
        self.loggers.close()
        self.train_loader.close()
        self.val_loader.close()
        self.engine.close()
        if self.lock is not None:
            self.lock.close()


def build_parts(config: TrainConfig, world: World, start: RunStart = FIRST_START) -> Parts:
    """Build a run; a collective.

    Args:
        config: what the user asked for.
        world: the ranks.
        start: which start of the run this is.

    Raises:
        UserError: on all ranks, for a mistake that any of them found.
    """
    precision = agreed(lambda: resolve_precision(config.precision, world.device), world)
    strategy_json = agreed(lambda: read_strategy_json(config.strategy, config.deepspeed_config), world)
    data = agreed(lambda: load_data(_data_options(config)), world)
    folder, lock = create_folder(config, start, world)
    found, notes = find_checkpoint(config, folder, start, world)
    config = agreed(lambda: hold_global_batch(config, found, world), world)
    head_epochs = config.head_epochs if model_spec(config.model_type).always_pretrained else 0
    settings = _loop_settings(config, data, head_epochs, world)
    # Worker processes take seconds to start: they do so while the model and the engine are built.
    train_loader, val_loader = agreed(lambda: _build_loaders(config, data, settings.plan, world), world)
    built, flops = _build_model(config, data, world)
    if found is not None:
        fits = found
        agreed(
            lambda: check_fit(fits, config, _identity(data, built, settings.plan), settings.plan.steps_per_epoch), world
        )
    sharding = engine_config(
        strategy_json,
        batch_size_per_rank=config.batch_size,
        accumulation_steps=config.gradient_accumulation_steps,
        gradient_clipping=config.gradient_clipping,
        offload=config.offload,
    )
    engine_name = agreed(lambda: resolve_engine(config.engine, sharding, built.module, world.device), world)
    compiles = agreed(lambda: resolve_compile(config.compile, world.device), world)
    first_step = _first_step(found, settings.plan)
    loggers = _build_loggers(config, folder, precision, data, built, sharding, world, first_step)
    optimizer = build_optimizer(built.module, config, built.head_parameter_names, discriminative=head_epochs > 0)
    backbone = RestingBackbone(built.module, built.head_parameter_names)
    engine = build_engine(built.module, optimizer, sharding, precision, world, engine_name)
    if compiles:
        engine.compile(compile_mode(world.device, config.batch_size, sharding["zero_optimization"]["stage"]))
    return Parts(
        config=config,
        world=world,
        precision=precision,
        data=data,
        built=built,
        folder=folder,
        lock=lock,
        settings=settings,
        head_epochs=head_epochs,
        engine=engine,
        backbone=backbone,
        flops=flops,
        loggers=loggers,
        found=found,
        notes=notes,
        train_loader=train_loader,
        val_loader=val_loader,
    )


def _data_options(config: TrainConfig) -> DataOptions:
    normalization = starting_normalization(config.model_type, pretrained=config.pretrained, weights=config.weights)
    mean, std = normalization or (None, None)
    return DataOptions(
        mean=mean,
        std=std,
        data=config.data,
        val_fraction=config.val_fraction,
        image_size=config.image_size,
        augmentation=config.augmentation,
        bad_images=config.bad_images,
        download=config.download,
        data_root=config.data_root,
        seed=config.seed,
        decode=config.decode,
        cache=config.cache,
        cache_gb=config.cache_gb,
    )


def _build_model(config: TrainConfig, data: DataBundle, world: World) -> tuple[BuiltModel, TrainingFlops | None]:
    def build() -> BuiltModel:
        # The same seed on every rank: all start from the same weights.
        torch.manual_seed(config.seed)
        return build_model(
            config.model_type,
            num_classes=len(data.class_names),
            image_size=data.preprocessing["image_size"],
            pretrained=config.pretrained,
            weights=config.weights or None,
            members=tuple(config.ensemble_members.split(",")),
            batch_size=config.batch_size,
        )

    # One rank of each machine goes first: it downloads hub weights, the others then find them in its cache.
    built = agreed(lambda: build() if world.local_rank == 0 else None, world)
    if built is None:
        built = build()
    module = built.module.to(world.device)
    # Before anything is converted for several ranks: rank 0 counts alone.
    flops = TrainingFlops(module, data.preprocessing["image_size"]) if world.is_main else None
    if config.activation_checkpointing:
        enable_activation_checkpointing(module)
    if config.sync_batchnorm:
        module = synchronize_batchnorm(module, world)
    return dataclasses.replace(built, module=module), flops


def _loop_settings(config: TrainConfig, data: DataBundle, head_epochs: int, world: World) -> LoopSettings:
    plan = BatchPlan(len(data.train), config.batch_size, config.gradient_accumulation_steps, world.size, config.seed)
    return LoopSettings(
        plan=plan,
        schedule=build_schedule(config, plan.steps_per_epoch, plan.global_batch, head_epochs),
        num_classes=len(data.class_names),
        image_size=data.preprocessing["image_size"],
        seed=config.seed,
        label_smoothing=config.label_smoothing,
        log_every_steps=config.log_every_steps,
        epochs=config.epochs,
    )


def _first_step(found: FoundCheckpoint | None, plan: BatchPlan) -> int:
    return found.manifest.progress.epoch * plan.steps_per_epoch + found.manifest.progress.step if found else 0


def _identity(data: DataBundle, built: BuiltModel, plan: BatchPlan) -> dict[str, Any]:
    return {
        "model": built.description,
        "class list": data.class_names,
        "data set": data.fingerprint,
        "global batch": plan.global_batch,
    }


def _build_loggers(
    config: TrainConfig,
    folder: RunFolder,
    precision: str,
    data: DataBundle,
    built: BuiltModel,
    sharding: dict[str, Any],
    world: World,
    first_step: int,
) -> Loggers:
    if not world.is_main:
        return Loggers([])
    facts = describe_environment(world) | {
        "precision": precision,
        "data_fingerprint": data.fingerprint,
        "training_images": len(data.train),
        "validation_images": len(data.val),
        "model": built.description,
    }
    loggers = build_loggers(config, folder, facts, first_step)
    try:
        save_config(config, folder.config)
        _write_json(folder.environment, facts)
        _write_json(folder.path / "deepspeed_config.json", sharding)
    except OSError as error:
        loggers.message(f"note: the run's description cannot be written: {error}")
    return loggers


def _build_loaders(
    config: TrainConfig, data: DataBundle, plan: BatchPlan, world: World
) -> tuple[TrainLoader, EvaluationLoader]:
    if data.train.source.decodes_later and world.device.type != "cuda":
        raise UserError("--decode gpu needs a GPU, and this run has none: leave it at --decode cpu.")
    is_automatic = config.workers == "auto"
    workers = automatic_workers(data.train, world.device, world.local_size) if is_automatic else int(config.workers)
    if workers:
        workers = _fit_into_memory(workers, is_automatic, config.batch_size, data, world)
    evaluation = EvaluationPlan(len(data.val), config.batch_size, world.size)
    return (
        TrainLoader(data, plan, world.rank, workers=workers, device=world.device),
        EvaluationLoader(data, evaluation, world.rank, workers=workers, device=world.device),
    )


def _fit_into_memory(workers: int, is_automatic: bool, batch_size: int, data: DataBundle, world: World) -> int:
    """Return as many workers, or of automatic ones as many as there is shared memory for.

    Raises:
        UserError: if as many were asked for as there is no room for.
    """
    batch_bytes = batch_size * 3 * data.preprocessing["image_size"] ** 2
    room = workers_with_room(batch_bytes, world.local_size)
    if workers <= room:
        return workers
    problem = f"{SHARED_MEMORY} has room for the batches of {room} data workers of each rank"
    if not is_automatic:
        raise UserError(
            f"--workers {workers}: {problem}. Give --workers {room}, or more shared memory (docker run --shm-size=8g)."
        )
    if world.is_main:
        print(f"note: {problem}, {workers} would be better", file=sys.stderr, flush=True)
    return room


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
