"""The table of contents of a run: build, train, close."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import torch

from delivery.weights import save_weights
from training.announce import announce_end, announce_start
from training.batchnorm import average_buffers
from training.checkpoint import Progress, find_checkpoint, gather_weights, load_checkpoint, save_checkpoint
from training.config import TrainConfig
from training.distributed import start_world, stop_world
from training.errors import SECONDS_FOR_RANK_0_TO_SPEAK, USER_ERROR_EXIT_CODE, AgreedError, UserError
from training.loggers import EpochPoint
from training.loop import EpochResult, evaluate, train_one_epoch
from training.metrics import Scores
from training.parts import Parts, agreed, build_parts
from training.signals import StopRequest, exit_code_of


def run(config: TrainConfig) -> int:
    """Train as the configuration says; every rank calls this.

    Returns:
        The process's exit code: 0 after the last epoch, 130 or 143 after SIGINT or SIGTERM, 2 for a user's mistake.
    """
    world = start_world()
    stop = StopRequest()
    stop.install()
    parts = None
    try:
        parts = build_parts(config, world)
        return train(parts, stop)
    except UserError as error:
        if world.is_main or not isinstance(error, AgreedError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            # A launcher ends all ranks as soon as one has failed: rank 0 speaks first.
            time.sleep(SECONDS_FOR_RANK_0_TO_SPEAK)
        return USER_ERROR_EXIT_CODE
    finally:
        stop.close()
        if parts is not None:
            parts.close()
        stop_world()


def train(parts: Parts, stop: StopRequest) -> int:
    """Train to the last epoch, to the patience's end or to a signal, and return the exit code; a collective."""
    progress = _resume(parts)
    announce_start(parts, progress)
    stop_signal = 0
    while progress.epoch < parts.config.epochs and not stop_signal:
        if _is_out_of_patience(parts, progress):
            parts.loggers.message(f"no better top-1 for {progress.epochs_without_better} epochs: stopping early")
            break
        progress, stop_signal = _train_and_evaluate(parts, progress, stop)
    announce_end(parts, progress, stop_signal)
    return exit_code_of(stop_signal) if stop_signal else 0


def _train_and_evaluate(parts: Parts, progress: Progress, stop: StopRequest) -> tuple[Progress, int]:
    """Run one epoch, or the part of it before a signal, and save; return the new progress and the signal."""
    parts.engine.train()
    if progress.epoch < parts.head_epochs:
        parts.backbone.rest()
    else:
        parts.backbone.wake()
    result = train_one_epoch(
        parts.engine,
        parts.train_loader.epoch(progress.epoch, progress.step),
        parts.settings,
        epoch=progress.epoch,
        first_step=progress.step,
        world=parts.world,
        loggers=parts.loggers,
        stop=stop,
    )
    average_buffers(parts.engine.module, parts.world)
    if result.stop_signal:
        progress = dataclasses.replace(progress, step=progress.step + result.steps_done)
        _save_checkpoint(parts, gather_weights(parts.engine, parts.world), progress, is_best=False)
        return progress, result.stop_signal
    scores = evaluate(parts.engine, parts.val_loader, parts.settings, parts.world)
    progress = _after_evaluation(parts, progress, result, scores)
    is_last = progress.epoch == parts.config.epochs
    return progress, 0 if is_last else stop.poll(parts.world)


def _after_evaluation(parts: Parts, progress: Progress, result: EpochResult, scores: Scores) -> Progress:
    """Log an epoch, save its checkpoint and, where it is the best so far, its weights; a collective."""
    is_best = scores.top1 > progress.best_top1
    epoch = progress.epoch + 1
    progress = Progress(
        epoch=epoch,
        step=0,
        best_top1=max(scores.top1, progress.best_top1),
        best_epoch=epoch if is_best else progress.best_epoch,
        epochs_without_better=0 if is_best else progress.epochs_without_better + 1,
    )
    parts.loggers.epoch(
        EpochPoint(
            epoch=epoch,
            step=epoch * parts.settings.plan.steps_per_epoch,
            epochs=parts.config.epochs,
            train_loss=result.scores.loss,
            train_top1=result.scores.top1,
            validation=scores,
            images_per_second=result.images_per_second,
            data_wait_share=result.data_wait_share,
            seconds=result.seconds,
            is_best=is_best,
            class_names=parts.data.class_names,
        )
    )
    weights = gather_weights(parts.engine, parts.world)
    if is_best:
        _save_weights(parts, weights, epoch, scores)
    _save_checkpoint(parts, weights, progress, is_best=is_best)
    return progress


def _save_weights(parts: Parts, weights: dict[str, torch.Tensor], epoch: int, scores: Scores) -> None:
    if parts.world.is_main:
        save_weights(
            parts.folder.weights,
            weights,
            description=parts.built.description,
            class_names=parts.data.class_names,
            preprocessing=parts.data.preprocessing,
            extra={"epoch": epoch, "top1": scores.top1, "top5": scores.top5, "loss": scores.loss},
        )


def _save_checkpoint(parts: Parts, weights: dict[str, torch.Tensor], progress: Progress, *, is_best: bool) -> None:
    folder, identity = parts.folder.checkpoints, _identity(parts)
    save_checkpoint(folder, parts.engine, weights, progress, identity, parts.world, is_best=is_best)


def _resume(parts: Parts) -> Progress:
    path = agreed(lambda: find_checkpoint(parts.config.resume, parts.folder.checkpoints), parts.world)
    if path is None:
        return Progress()
    progress = agreed(lambda: load_checkpoint(path, parts.engine, _identity(parts)), parts.world)
    parts.loggers.message(f"resuming from {path}: epoch {progress.epoch + 1}, step {progress.step + 1}")
    return progress


def _identity(parts: Parts) -> dict[str, Any]:
    """Return what a checkpoint and the run that resumes from it must agree on."""
    return {
        "model": parts.built.description,
        "classes": parts.data.class_names,
        "data fingerprint": parts.data.fingerprint,
        "global batch": parts.settings.plan.global_batch,
        "epochs": parts.config.epochs,
        "optimizer": parts.config.optimizer,
        "seed": parts.config.seed,
    }


def _is_out_of_patience(parts: Parts, progress: Progress) -> bool:
    return 0 < parts.config.early_stopping_patience <= progress.epochs_without_better
